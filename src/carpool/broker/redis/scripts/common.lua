-- Prepended to every script. A script touches one shard only: all its keys share a hash tag.
-- Streams are named by the fields of `lanes`, so not every key can be declared; they lie in the declared ones' slot.
local GROUP = 'batchers'

-- Redis's clock in ms; tests may say another time.
local function clock(given)
  if given ~= '' then
    return tonumber(given)
  end
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function count_of(counts, name)
  return tonumber(redis.call('HGET', counts, name) or '0')
end

-- Names and values that alternate, as a table.
local function facts_of(flat)
  local facts = {}
  for i = 1, #flat, 2 do
    facts[flat[i]] = flat[i + 1]
  end
  return facts
end

-- What the group has seen of a stream: pending entries and the last id delivered; nil if the stream is gone.
local function group_of(stream)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  if groups.err or not groups[1] then
    return nil
  end
  local facts = facts_of(groups[1])
  return facts['pending'], facts['last-delivered-id']
end

-- Batchers that found nothing sleep until the bell; those that found something come back by themselves. So it is rung
-- when nothing but what was just added waits in a stream. It names the stream: whoever knows of one alone learns so that
-- there is another.
local function ring_if_new(stream, added, bell)
  local pending = group_of(stream)
  if not pending then
    -- The stream is new; or somebody deleted it and it came back without its group.
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
    pending = 0
  end
  if redis.call('XLEN', stream) - pending <= added then
    redis.call('SPUBLISH', bell, added .. ' ' .. stream)
  end
end

-- The id of the first entry that nobody took; nil if there is none.
local function head_of(stream, last_delivered)
  local first = redis.call('XRANGE', stream, '(' .. last_delivered, '+', 'COUNT', 1)
  return first[1] and first[1][1]
end

local function ms_text_of(id)
  return string.match(id, '^(%d+)')
end

-- At maxmemory Redis refuses a script's first write if that needs memory, and none after it. What frees memory, or
-- must not be lost, begins with this: it removes nothing.
local function write_also_without_memory(hash)
  redis.call('HDEL', hash, '')
end

-- An entry's value (records.py) is: the ticket (8 bytes), a byte each for the lengths of id and owner, the id, the owner,
-- the client's own bytes.
local function owner_of(value)
  local id_length, owner_length = string.byte(value, 9, 10)
  return string.sub(value, 11 + id_length, 10 + id_length + owner_length)
end

local function input_of(value)
  local id_length, owner_length = string.byte(value, 9, 10)
  return string.sub(value, 11 + id_length + owner_length)
end

local function ms_of(id)
  return tonumber(ms_text_of(id))
end

-- Forget a stream that has no entries, but none that got some just now: a new one must not give the same ids again.
local QUIET_MS = 1000
local function drop_if_idle(lanes, field, stream, now)
  if redis.call('XLEN', stream) > 0 then
    return
  end
  local state = redis.pcall('XINFO', 'STREAM', stream)
  if state.err or ms_of(facts_of(state)['last-generated-id']) < now - QUIET_MS then
    redis.call('DEL', stream)
    redis.call('HDEL', lanes, field)
  end
end
