-- A task has its outcome: result, dead letter and acknowledgement in one step. The first written result wins.
-- ARGV: id of the task, field, id of the entry, status, result, ms that it is kept, now, letter ('' for none), number of
--       the shard, most letters, most bytes of them, 1 if memory is short
-- Returns: 1 if this result was kept, else 0; names of the gateways where somebody waits for it; how many dead letters
--          were dropped
local task, field, entry_id, letter = task_of(ARGV[1]), ARGV[2], ARGV[3], ARGV[8]
local stream, now, dropped = stream_of(field), clock(ARGV[7]), 0
local state = redis.call('HMGET', task, 's', 'w', 'b')
local is_first = state[1] == 'P'
-- The result takes the place of the input, so there is always memory for it.
write_also_without_memory(COUNTS)
if is_first then
  local part, size = part_of('result_bytes', now, tonumber(ARGV[6])), #ARGV[5] + TASK_BYTES
  uncount_bytes(state[3])
  count_bytes(part, size)
  redis.call('HSET', task, 's', ARGV[4], 'r', ARGV[5], 't', now, 'b', size .. ' ' .. part)
  if letter ~= '' then
    local entry = redis.call('XRANGE', stream, entry_id, entry_id)[1]
    if entry then
      local value = entry[2][2]
      local body = letter .. string.sub(value, input_at(value))
      dropped = bury(body, now, tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11]), ARGV[12] == '1')
    end
  end
  redis.call('HDEL', task, 'f', 'w') -- the id of its entry tells when it was submitted
  redis.call('PEXPIRE', task, ARGV[6])
end
local was_pending = redis.call('XACK', stream, GROUP, entry_id) == 1
if redis.call('XDEL', stream, entry_id) == 1 then
  if was_pending then
    count(field, -1, 0)
  else -- a replica that took over may not know that it was taken
    look_again(field)
  end
  ended(field, now)
end
drop_idle(2, now)
return { is_first and 1 or 0, is_first and state[2] or '', dropped }
