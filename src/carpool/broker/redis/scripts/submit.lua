-- Queue requests of one lane, line and gateway: as many as there is room for, in order. With task keys: tasks.
-- KEYS: lanes, counts, stream, letters, letter bodies, then a task key for each value (tasks only)
-- ARGV: field, model, most entries held, most lanes (0: this lane is never refused), bell, now, header,
--       id of the dead letter that becomes a task ('' for none), values
-- Returns: id of the first entry (the others follow it without a gap), how many were queued, now, entries held
local lanes, counts, stream = KEYS[1], KEYS[2], KEYS[3]
local field, held_max, lanes_max = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
local now = clock(ARGV[6])
local entry_id = ARGV[6] == '' and '*' or ARGV[6] .. '-*'
local header, letter = ARGV[7], ARGV[8]
local VALUES = 8

local room = held_max - count_of(counts, 'held')
local wanted = math.min(#ARGV - VALUES, room)
if wanted <= 0 then
  return redis.error_reply('QUEUEFULL no room for another entry')
end

if redis.call('HEXISTS', lanes, field) == 0 then
  if lanes_max > 0 then
    local lane, found, waiting = string.match(field, '^(%x+)'), {}, 0
    for _, other in ipairs(redis.call('HKEYS', lanes)) do
      local name = string.match(other, '^(%x+)')
      local other_stream = string.sub(stream, 1, #stream - #field) .. other
      local _, last = group_of(other_stream)
      if name ~= lane and not found[name] and last and head_of(other_stream, last) then
        found[name] = true
        waiting = waiting + 1
      end
    end
    if waiting >= lanes_max then
      return redis.error_reply('LANESFULL too many lanes wait')
    end
  end
  redis.call('HSET', lanes, field, ARGV[2])
end

if letter ~= '' and redis.call('ZREM', KEYS[4], letter) == 0 then
  return redis.error_reply('NOLETTER there is no such dead letter')
end

local first
for i = 1, wanted do
  local id = redis.call('XADD', stream, entry_id, header, ARGV[VALUES + i])
  if not first then
    first = id
    -- Redis's clock goes on while a script runs: the others stay in the first one's millisecond, without a gap.
    entry_id = ms_text_of(id) .. '-*'
  end
  if KEYS[5 + i] then
    redis.call('HSET', KEYS[5 + i], 's', 'P', 'o', owner_of(ARGV[VALUES + i]), 't', now, 'f', field, 'e', id)
  end
end
if letter ~= '' then
  redis.call('HDEL', KEYS[5], letter)
end
local held = redis.call('HINCRBY', counts, 'held', wanted)
redis.call('HINCRBY', counts, 'unread', wanted)
ring_if_new(stream, wanted, ARGV[5])
return { first, wanted, now, held }
