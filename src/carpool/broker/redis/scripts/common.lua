-- Prepended to every script of a shard. KEYS[1] is the shard's `counts`. All its other keys have the same hash tag, so
-- they lie in the same slot; which of them a script needs is often known only here. While the slot moves, no such script
-- is sent (client/nodes.py).
local GROUP = 'batchers'
local COUNTS = KEYS[1]
local PREFIX = string.sub(COUNTS, 1, -#'counts' - 1)
local LANES, SIZES, LEASED, IDLE = PREFIX .. 'lanes', PREFIX .. 'sizes', PREFIX .. 'leased', PREFIX .. 'idle'
local OPENERS = PREFIX .. 'openers'
local LETTERS, LETTER_BODIES = PREFIX .. 'letters', PREFIX .. 'letter'
local WAKEUP = PREFIX .. 'wakeup'

local function stream_of(field)
  return PREFIX .. 'q:' .. field
end

local function task_of(id)
  return PREFIX .. 'task:' .. id
end

-- The streams of a model that have entries nobody took, by the place of the first one.
local function heads_of(model)
  return PREFIX .. 'heads:' .. model
end

local function lane_of(field)
  return string.match(field, '^(.-):')
end

-- By what entries of its line that nobody took are counted in `counts`.
local function unread_of(field)
  return 'unread:' .. (string.match(field, ':(.*)$') or '')
end

local function count_of(name)
  return tonumber(redis.call('HGET', COUNTS, name) or '0')
end

-- Names and values that alternate, as a table.
local function facts_of(flat)
  local facts = {}
  for i = 1, #flat, 2 do
    facts[flat[i]] = flat[i + 1]
  end
  return facts
end

local function ms_text_of(id)
  return string.match(id, '^(%d+)')
end

local function ms_of(id)
  return tonumber(ms_text_of(id))
end

-- What is said of a stream in `lanes`: what its line adds to an entry's time for its place in the order, whether its
-- lane counts against the bound on lanes, and the model.
local function read_about(text)
  local offset, bound, model = string.match(text, '^(%d+) ([b-]) (.*)$')
  if not offset then -- written by the version before
    return 0, false, text
  end
  return tonumber(offset), bound == 'b', model
end

local function about(field)
  local text = redis.call('HGET', LANES, field)
  if text then
    return read_about(text)
  end
end

-- What the group has seen of a stream: pending entries and the last id delivered; nil if the stream is gone.
local function group_of(stream)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  for _, group in ipairs(groups.err and {} or groups) do
    if group[2] == GROUP then -- name, <name>, …; somebody may have made others
      local facts = facts_of(group)
      return facts['pending'], facts['last-delivered-id']
    end
  end
end

-- How many entries a stream has; none if somebody put something else in its place.
local function length_of(stream)
  local length = redis.pcall('XLEN', stream)
  return type(length) == 'number' and length or 0
end

-- The id of the first entry that nobody took; nil if there is none. Nothing comes after the last id that there is.
-- An entry comes whole: `carried_bytes` is what that was.
local carried_bytes = 0
local function head_of(stream, last_delivered)
  local first = redis.pcall('XRANGE', stream, '(' .. last_delivered, '+', 'COUNT', 1)
  if first[1] then
    carried_bytes = carried_bytes + #(first[1][2][2] or '')
    return first[1][1]
  end
end

-- Batchers that found nothing sleep until a wakeup; those that found something come back by themselves. It says where
-- something waits, so that nobody has to ask.
local function notify(field, model, place, unread)
  redis.call('SPUBLISH', WAKEUP, string.format('%d %.0f %s %s', unread, place, field, model))
end

-- A stream has entries to take, and had none: `openers` has those of lanes that count against the bound.
local function begins_to_wait(field, bound, owner)
  if bound then
    redis.call('HSETNX', OPENERS, field, owner)
  end
end

-- It has none any more.
local function ends_to_wait(field, bound, model)
  redis.call('ZREM', heads_of(model), field)
  if bound then
    redis.call('HDEL', OPENERS, field)
  end
end

-- An entry that a batcher gave back has had no lease for so long: every other batcher may have it at once.
local GIVEN_BACK_MS = 86400000
-- Redis counts the deliveries of an entry. The count is below this; what batchers carry along is a multiple of it
-- (leases.py).
local CARRIED_FROM = 1024

local function deliveries_of(lease)
  return lease[4] % CARRIED_FROM
end

-- What is carried along: with how many batchers it failed (0 to 7), how often it was given back (times 8), whether it
-- was sent to try an endpoint that had failed (32), whether a batcher would have blamed its input (64).
local function goes_alone(lease)
  return math.floor(lease[4] / CARRIED_FROM) % 8 >= 2
end

local function was_given_back(lease)
  return math.floor(lease[4] / CARRIED_FROM / 8) % 4 >= 1
end

local function was_given_back_twice(lease)
  return math.floor(lease[4] / CARRIED_FROM / 8) % 4 >= 2
end

local function was_probe(lease)
  return math.floor(lease[4] / CARRIED_FROM / 32) % 2 == 1
end

local function was_blamed(lease)
  return math.floor(lease[4] / CARRIED_FROM / 64) % 2 == 1
end

-- The lease of an entry: its id, who has it, for how many ms, how often it was delivered; nil if nobody has it.
local function lease_of(field, id)
  local found = redis.pcall('XPENDING', stream_of(field), GROUP, id, id, 1)
  return not found.err and found[1] or nil
end

-- Change by how much a stream counts.
local function count(field, held, unread)
  if held ~= 0 then
    redis.call('HINCRBY', SIZES, 'h' .. field, held)
    redis.call('HINCRBY', COUNTS, 'held', held)
  end
  if unread ~= 0 then
    redis.call('HINCRBY', SIZES, 'u' .. field, unread)
    redis.call('HINCRBY', COUNTS, 'unread', unread)
    redis.call('HINCRBY', COUNTS, unread_of(field), unread)
  end
end

-- Entries were added to a stream; the first has this place if none was waiting.
local function added(field, text, number, now, owner)
  if redis.call('HGET', LANES, field) ~= text then
    redis.call('HSET', LANES, field, text)
    redis.pcall('XGROUP', 'CREATE', stream_of(field), GROUP, '0', 'MKSTREAM') -- it may have one
  end
  count(field, number, number)
  local offset, bound, model = read_about(text)
  local place = now + offset
  if redis.call('ZADD', heads_of(model), 'NX', string.format('%.0f', place), field) == 1 then
    begins_to_wait(field, bound, owner)
    notify(field, model, place, number)
  end
end

-- Look at a stream itself: how many entries it has, how many of them nobody took, and the place of the first of these.
-- Returns the last two. `models`: whose it may be, if somebody removed what was said of it.
local function look_again(field, models)
  local offset, bound, model = about(field)
  if not model then
    for _, name in ipairs(models or {}) do
      redis.call('ZREM', heads_of(name), field)
    end
    return 0
  end
  local stream = stream_of(field)
  local pending, last = group_of(stream)
  local length = length_of(stream)
  if not pending and length > 0 then -- somebody deleted the stream, and it came back without its group
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0')
    pending, last = 0, '0-0'
  end
  local head = length > 0 and head_of(stream, last)
  local unread = head and math.max(length - pending, 1) or 0
  local before = redis.call('HMGET', SIZES, 'h' .. field, 'u' .. field)
  local held_before, unread_before = tonumber(before[1]), tonumber(before[2] or '0')
  if held_before and unread_before then
    count(field, length - held_before, unread - unread_before)
  else -- the version before counted it in the totals alone; or somebody wrote something else there
    redis.call('HSET', SIZES, 'h' .. field, length, 'u' .. field, unread)
  end
  if not head then
    ends_to_wait(field, bound, model)
    return 0
  end
  local place = ms_of(head) + offset
  if redis.call('ZADD', heads_of(model), string.format('%.0f', place), field) == 1 then
    begins_to_wait(field, bound, '')
  end
  return unread, place, model
end

-- Entries of a stream are leased, so somebody has to look whether the leases are kept: in turn.
local function leased(field)
  if not redis.call('ZSCORE', LEASED, field) then
    redis.call('ZADD', LEASED, redis.call('HINCRBY', SIZES, 'looks', 1), field)
  end
end

-- Others come before it the next time. Returns the oldest id with a lease; nothing if there is none any more.
local function looked_at(field)
  local leases = redis.pcall('XPENDING', stream_of(field), GROUP)
  if leases.err or leases[1] == 0 then
    redis.call('ZREM', LEASED, field)
    return nil
  end
  redis.call('ZADD', LEASED, redis.call('HINCRBY', SIZES, 'looks', 1), field)
  return leases[2]
end

-- Forget a stream that has no entries, but none that got some just now: a new one must not give the same ids again.
local QUIET_MS = 1000
local function drop_if_idle(field, now)
  local stream = stream_of(field)
  if length_of(stream) == 0 then
    local state = redis.pcall('XINFO', 'STREAM', stream)
    local last = not state.err and ms_of(facts_of(state)['last-generated-id']) or 0
    -- One with an id from the future, which somebody made up, would never be quiet, and may take no more entries.
    if last >= now - QUIET_MS and last <= now + QUIET_MS then
      redis.call('ZADD', IDLE, now, field) -- not yet
      return
    end
    local _, bound, model = about(field)
    if model then
      ends_to_wait(field, bound, model)
    end
    redis.call('DEL', stream, PREFIX .. 'gone:' .. field)
    redis.call('HDEL', LANES, field)
    redis.call('HDEL', SIZES, 'h' .. field, 'u' .. field, 's' .. field, 'n' .. field)
    redis.call('ZREM', LEASED, field)
  end
  redis.call('ZREM', IDLE, field)
end

-- Clients that never repeat their parameters leave streams behind: whoever ends the use of some drops as many.
local function ended(field, now)
  if length_of(stream_of(field)) == 0 then
    redis.call('ZADD', IDLE, 'NX', now, field)
  end
end

-- Entries have their outcome. Returns how many of them there were.
local function forget_entries(field, ids, now)
  local stream = stream_of(field)
  local acknowledged = redis.call('XACK', stream, GROUP, unpack(ids))
  local deleted = redis.call('XDEL', stream, unpack(ids))
  if deleted > acknowledged then -- a replica that was promoted may not know that they were taken
    look_again(field)
  else
    count(field, -deleted, 0)
  end
  ended(field, now)
  return deleted
end

local function drop_idle(number, now)
  for _, field in ipairs(redis.call('ZRANGE', IDLE, '-inf', now - QUIET_MS, 'BYSCORE', 'LIMIT', 0, number)) do
    drop_if_idle(field, now)
  end
end

-- What a batcher must know of a shard: now, whether a lease is over (nil if nobody asked), then for each model the best
-- streams with entries nobody took: field, place and how many.
local HEADS_MAX = 32
local function view_of(models, now, has_lapsed)
  local view = { now, has_lapsed or false }
  for _, model in ipairs(models) do
    local found = redis.call('ZRANGE', heads_of(model), 0, HEADS_MAX - 1, 'WITHSCORES')
    local heads = {}
    for i = 1, #found, 2 do
      heads[#heads + 1] = found[i]
      heads[#heads + 1] = found[i + 1]
      heads[#heads + 1] = tonumber(redis.call('HGET', SIZES, 'u' .. found[i]) or '0')
    end
    view[#view + 1] = heads
  end
  return view
end

-- From when the times of an entry count: when its gateway sent it, which may be before it was added (formats.py).
local function began_ms(added_ms, value)
  local high, low = struct.unpack('>I4I4', value, 20)
  local sent_ms = high * 4294967296 + low
  return sent_ms > 0 and math.min(sent_ms, added_ms) or added_ms
end

-- When the time of an entry is over, and the request's id; nothing for one of another format (formats.py).
local function life_of(entry)
  local value = entry[2][2]
  if not value or #value < 30 or string.byte(value) ~= 4 then
    return nil
  end
  local high, low = struct.unpack('>I4I4', value, 12)
  local id_length = string.byte(value, 28)
  return began_ms(ms_of(entry[1]), value) + high * 4294967296 + low, string.sub(value, 30, 29 + id_length)
end

-- Nobody waits for entries any more: they are deleted, and the batchers that have them are told. Whoever claims them
-- later finds nothing.
local function nobody_waits(entries)
  local told = {}
  for _, entry in ipairs(entries) do
    local field, id, consumer = entry[1], entry[2], entry[3]
    redis.call('XACK', stream_of(field), GROUP, id)
    count(field, -redis.call('XDEL', stream_of(field), id), 0)
    told[consumer] = told[consumer] or {}
    table.insert(told[consumer], field .. ' ' .. id)
  end
  for consumer, ids in pairs(told) do
    redis.call('SPUBLISH', WAKEUP, 'left ' .. consumer .. ' ' .. table.concat(ids, ' '))
  end
end

-- Where the client's own bytes begin in an entry's value (formats.py): behind the number of the format (a byte), the
-- length of the record (two) and the record.
local function input_at(value)
  return 4 + struct.unpack('>H', value, 2)
end
