-- Queue requests of one lane, line and gateway: as many as there is room for, in order. With task ids: tasks.
-- ARGV: field, what is said of it, most entries held, most lanes, now, header, owner of the first,
--       id of the dead letter that becomes a task ('' for none), number of values, values, ids of the tasks (if any)
-- Returns: id of the first entry (the others follow it without a gap), how many were queued, entries held, lanes that
--          count against the bound
local field, text, held_max, lanes_max = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local now, header, owner, letter = clock(ARGV[5]), ARGV[6], ARGV[7], ARGV[8]
local VALUES = 9
local values = tonumber(ARGV[VALUES])
local wanted = math.min(values, held_max - count_of('held'))
if wanted <= 0 then
  return redis.error_reply('QUEUEFULL no room for another entry')
end

local _, bound = read_about(text)
if bound and redis.call('HEXISTS', OPENERS, lane_of(field)) == 0 and redis.call('HLEN', OPENERS) >= lanes_max then
  -- Whoever has opened less than its share of them is not refused because of what others have opened.
  local own = tonumber(redis.call('HGET', OPENED, owner) or '0')
  local owners = redis.call('HLEN', OPENED) + (own == 0 and 1 or 0)
  if own >= math.max(1, math.floor(lanes_max / owners)) then
    return redis.error_reply('LANESFULL too many lanes wait')
  end
end

if letter ~= '' and redis.call('ZREM', LETTERS, letter) == 0 then
  return redis.error_reply('NOLETTER there is no such dead letter')
end

local stream, first = stream_of(field), nil
local entry_id = ARGV[5] == '' and '*' or ARGV[5] .. '-*'
for i = 1, wanted do
  local value = ARGV[VALUES + i]
  local id = redis.call('XADD', stream, entry_id, header, value)
  if not first then
    first = id
    -- Redis's clock goes on while a script runs: the others stay in the first one's millisecond, without a gap.
    entry_id = ms_text_of(id) .. '-*'
  end
  local task = ARGV[VALUES + values + i]
  if task then
    redis.call('HSET', task_of(task), 's', 'P', 'o', owner_of(value), 't', now, 'f', field, 'e', id)
  end
end
if letter ~= '' then
  redis.call('HDEL', LETTER_BODIES, letter)
end
added(field, text, wanted, ms_of(first), owner)
return { first, wanted, count_of('held'), redis.call('HLEN', OPENERS) }
