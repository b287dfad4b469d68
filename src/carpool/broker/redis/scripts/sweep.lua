-- Keep a shard tidy, a part of its streams at a time: drop those that are empty and consumers that left, count again,
-- forget old dead letters, end what no batcher ends because none serves its model any more.
-- ARGV: where to go on (0: at the beginning), now, ms after which an idle consumer is gone, most dead letters, most bytes
--       of them, 1 if memory is short, ms that they are kept, ms after which their bytes are counted again, the result of a
--       task whose time is over, with @ for its id, ms that this is kept (without
--       these two, none is ended)
-- Returns: where to go on (0: that was the last part), entries held, unread ones, how many letters were dropped before
--          their time, how many tasks were ended
local STREAMS_AT_ONCE, DROPPED_AT_ONCE = 64, 256
local now = clock(ARGV[2])
-- All but the letters is found out again, so what somebody put in its place may go.
local function heal(key, kind)
  local found = redis.pcall('TYPE', key)
  if not found.err and found.ok ~= kind and found.ok ~= 'none' then
    redis.call('DEL', key)
  end
end
if ARGV[1] == '0' then
  for _, key in ipairs({ COUNTS, LANES, SIZES, OPENERS, OPENED, LINES, LETTER_BODIES }) do
    heal(key, 'hash')
  end
  for _, key in ipairs({ LEASED, IDLE, LETTERS }) do
    heal(key, 'zset')
  end
end
write_also_without_memory(COUNTS)
local healed, late_tasks, waiting = {}, 0, {}

-- End the oldest entries of a stream, while their time has long been over. One at a time: each is carried whole. Returns
-- how many.
local LATE_AT_ONCE, GRACE_MS = 64, 10000
local function end_late(field)
  for number = 0, LATE_AT_ONCE - 1 do
    local entry = redis.call('XRANGE', stream_of(field), '-', '+', 'COUNT', 1)[1]
    local over_at, id
    if entry then
      over_at, id = life_of(entry)
    end
    if not over_at or over_at + GRACE_MS > now then
      return number
    end
    local state = redis.call('HMGET', task_of(id), 's', 'e', 'b')
    if state[1] == 'P' and state[2] == entry[1] then
      keep_result(task_of(id), state[3], 'F', (string.gsub(ARGV[9], '@', id)), now, tonumber(ARGV[10]))
      late_tasks = late_tasks + 1
    end
    forget_entry(field, entry[1], now)
  end
  return LATE_AT_ONCE
end

-- Whether a stream has entries that came so long ago that their time may be over.
local function has_old_ones(field, left, place)
  local offset = about(field) or 0
  local leases = redis.pcall('XPENDING', stream_of(field), GROUP)
  local leased_at = not leases.err and leases[2] and ms_of(leases[2]) or now
  return math.min(leased_at, left > 0 and place - offset or now) < now - GRACE_MS
end

local found = redis.call('HSCAN', LANES, ARGV[1], 'COUNT', STREAMS_AT_ONCE)
local held, unread = 0, 0
for i = 1, #found[2], 2 do
  local field = found[2][i]
  local _, bound, model = read_about(found[2][i + 1])
  if not healed[model] then
    healed[model] = true
    heal(heads_of(model), 'zset')
  end
  local left, place = look_again(field)
  if ARGV[9] and has_old_ones(field, left, place) and end_late(field) > 0 then
    left = look_again(field)
  end
  unread = unread + left
  if bound and left > 0 then
    waiting[#waiting + 1] = field
  end
  held = held + length_of(stream_of(field))
  ended(field, now)
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream_of(field), GROUP)
  for _, consumer in ipairs(consumers.err and {} or consumers) do
    -- name, <name>, pending, <number>, idle, <ms>; deleting one that has entries pending would lose them
    if consumer[4] > 0 then
      leased(field)
    elseif consumer[6] > tonumber(ARGV[3]) then
      redis.call('XGROUP', 'DELCONSUMER', stream_of(field), GROUP, consumer[2])
    end
  end
end
if ARGV[1] == '0' and found[1] == '0' then -- all of them at one moment: that is the truth
  redis.call('HSET', COUNTS, 'held', held, 'unread', unread)
  -- So are the lanes that count, if an older Carpool, or somebody else, has changed them.
  local lanes, owners = {}, facts_of(redis.call('HGETALL', OPENERS))
  local known = redis.call('HLEN', LINES) - redis.call('HLEN', OPENERS)
  for _, field in ipairs(waiting) do
    lanes[lane_of(field)] = true
    known = known - redis.call('HEXISTS', LINES, field)
  end
  local is_stale = known ~= 0
  for lane in pairs(owners) do
    is_stale = is_stale or not lanes[lane]
  end
  if is_stale then
    redis.call('DEL', OPENERS, OPENED, LINES)
    for _, field in ipairs(waiting) do
      begins_to_wait(field, true, owners[lane_of(field)] or '')
    end
  end
end
drop_idle(DROPPED_AT_ONCE, now)
local bytes = { input_bytes = 0, result_bytes = 0 }
local known = redis.call('HGETALL', COUNTS)
for i = 1, #known, 2 do
  local total, gone_at = string.match(known[i], '^(%l+_bytes):(%d+)$')
  if total and tonumber(gone_at) <= now then
    redis.call('HDEL', COUNTS, known[i])
  elseif total then
    bytes[total] = bytes[total] + math.max(tonumber(known[i + 1]), 0)
  end
end
redis.call('HSET', COUNTS, 'input_bytes', bytes.input_bytes, 'result_bytes', bytes.result_bytes)

local too_old = (now - tonumber(ARGV[7])) * 16
local old = redis.call('ZRANGEBYSCORE', LETTERS, '-inf', too_old, 'LIMIT', 0, REMOVED_AT_ONCE)
remove_letters(old)
if math.abs(now - count_of('letters_counted')) >= tonumber(ARGV[8]) then
  local letter_bytes = 0
  for _, id in ipairs(redis.call('ZRANGE', LETTERS, 0, -1)) do
    letter_bytes = letter_bytes + redis.call('HSTRLEN', LETTER_BODIES, id)
  end
  redis.call('HSET', COUNTS, 'letter_bytes', letter_bytes, 'letters_counted', now)
end
local letter_bytes_max = tonumber(ARGV[5])
if ARGV[6] == '1' then -- half of them now, half of the rest at the next sweep
  letter_bytes_max = math.min(letter_bytes_max, math.floor(count_of('letter_bytes') / 2))
end
local dropped = evict(tonumber(ARGV[4]), letter_bytes_max)
return { tonumber(found[1]), count_of('held'), count_of('unread'), dropped, late_tasks }
