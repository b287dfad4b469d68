-- A task has its outcome: result, dead letter and acknowledgement in one step. The first written result wins.
-- KEYS: task, counts, stream, letters, letter bodies
-- ARGV: id of the entry, status, result, ms that it is kept, now, letter ('' for none), number of the shard,
--       most letters, most bytes of them, 1 if memory is short
-- Returns: 1 if this result was kept, else 0; names of the gateways where somebody waits for it; how many dead letters
--          were dropped
local task, counts, stream = KEYS[1], KEYS[2], KEYS[3]
local entry_id, letter = ARGV[1], ARGV[6]
local now, dropped = clock(ARGV[5]), 0
local state = redis.call('HMGET', task, 's', 'w', 'b')
local is_first = state[1] == 'P'
-- The result takes the place of the input, so there is always memory for it.
write_also_without_memory(counts)
if is_first then
  local part, size = part_of('result_bytes', now, tonumber(ARGV[4])), #ARGV[3] + TASK_BYTES
  uncount_bytes(counts, state[3])
  count_bytes(counts, part, size)
  redis.call('HSET', task, 's', ARGV[2], 'r', ARGV[3], 't', now, 'b', size .. ' ' .. part)
  if letter ~= '' then
    local entry = redis.call('XRANGE', stream, entry_id, entry_id)[1]
    if entry then
      local value = entry[2][2]
      local body = body_of(owner_of(value), letter, input_of(value))
      local bounds = { tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10] == '1' }
      dropped = bury(KEYS[4], KEYS[5], counts, body, now, tonumber(ARGV[7]), unpack(bounds))
    end
  end
  redis.call('HDEL', task, 'f', 'w') -- the id of its entry tells when it was submitted
  redis.call('PEXPIRE', task, ARGV[4])
end
local was_pending = redis.call('XACK', stream, GROUP, entry_id) == 1
if redis.call('XDEL', stream, entry_id) == 1 then
  redis.call('HINCRBY', counts, 'held', -1)
  if not was_pending then -- a replica that took over may not know that it was taken
    redis.call('HINCRBY', counts, 'unread', -1)
  end
end
return { is_first and 1 or 0, is_first and state[2] or '', dropped }
