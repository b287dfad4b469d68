-- Queue requests of one lane, line and gateway: as many as there is room for, in order. With task keys: tasks.
-- KEYS: lanes, counts, stream, letters, letter bodies, then a task key for each value (tasks only)
-- ARGV: field, model, most entries held, most lanes (0: this lane is never refused), bell, now, header,
--       id of the dead letter that becomes a task ('' for none), for tasks: most bytes of their inputs, most bytes of
--       inputs and results, ms until they are over; values
-- Returns: id of the first entry (the others follow it without a gap), how many were queued, now, entries held
local lanes, counts, stream = KEYS[1], KEYS[2], KEYS[3]
local field, held_max, lanes_max = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
local now = clock(ARGV[6])
local entry_id = ARGV[6] == '' and '*' or ARGV[6] .. '-*'
local header, letter = ARGV[7], ARGV[8]
local VALUES = 11

local room = held_max - count_of(counts, 'held')
local wanted = math.min(#ARGV - VALUES, room)
if wanted <= 0 then
  return redis.error_reply('QUEUEFULL no room for another entry')
end

-- The bytes of tasks are bounded too; a shard that has none takes one of any size.
local part, input_bytes = nil, 0
if KEYS[6] then
  part = part_of('input_bytes', now, tonumber(ARGV[11]))
  local inputs = math.max(count_of(counts, 'input_bytes'), 0)
  local stored = inputs + math.max(count_of(counts, 'result_bytes'), 0)
  for i = 1, wanted do
    local size = #ARGV[VALUES + i] + TASK_BYTES
    local are_inputs_full = inputs > 0 and inputs + size > tonumber(ARGV[9])
    if are_inputs_full or (stored > 0 and stored + size > tonumber(ARGV[10])) then
      if i == 1 then
        return redis.error_reply(are_inputs_full and 'QUEUEFULL no room for its input' or 'STOREFULL no room')
      end
      wanted = i - 1
      break
    end
    inputs, stored, input_bytes = inputs + size, stored + size, input_bytes + size
  end
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

if letter ~= '' and remove_letters(KEYS[4], KEYS[5], counts, { letter }) == 0 then
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
    local state = { 's', 'P', 'o', owner_of(ARGV[VALUES + i]), 't', now, 'f', field, 'e', id }
    redis.call('HSET', KEYS[5 + i], 'b', #ARGV[VALUES + i] + TASK_BYTES .. ' ' .. part, unpack(state))
  end
end
if part then
  count_bytes(counts, part, input_bytes)
end
local held = redis.call('HINCRBY', counts, 'held', wanted)
redis.call('HINCRBY', counts, 'unread', wanted)
ring_if_new(stream, wanted, ARGV[5])
return { first, wanted, now, held }
