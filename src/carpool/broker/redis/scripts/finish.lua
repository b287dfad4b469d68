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
  keep_result(task, state[3], ARGV[4], ARGV[5], now, tonumber(ARGV[6]))
  if letter ~= '' then
    local entry = redis.call('XRANGE', stream, entry_id, entry_id)[1]
    if entry then
      local value = entry[2][2]
      local body = letter .. string.sub(value, input_at(value))
      dropped = bury(body, now, tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11]), ARGV[12] == '1')
    end
  end
end
forget_entries(field, { entry_id }, now)
drop_idle(2, now)
return { is_first and 1 or 0, is_first and state[2] or '', dropped }
