-- A task has its outcome: result, dead letter and acknowledgement in one step. The first written result wins. A finisher
-- whose reply was lost asks again, and is still the first. A task that may be withdrawn has no outcome yet.
-- ARGV: id of the task, field, id of the entry, status, result, ms that it is kept, now, letter ('' for none), number of
--       the shard, most letters, most bytes of them, 1 if memory is short, name of the finisher, ms from the submission to
--       the outcome
-- Returns: 1 if this finisher's result was kept, else 0, -1 if it is to come again later; names of the gateways where
--          somebody waits for it; how many dead letters were dropped
local task, field, entry_id, letter = task_of(ARGV[1]), ARGV[2], ARGV[3], ARGV[8]
local stream, now, dropped = stream_of(field), clock(ARGV[7]), 0
local state = redis.call('HMGET', task, 's', 'w', 'b', 'e')
-- Stands in the task in place of the entry's id, with which it begins: another field would cost 80 bytes.
local end_of_it = entry_id .. ' ' .. ARGV[13]
local is_first = state[1] == 'P'
if is_first and is_unsure(ARGV[1], now) then
  return { -1, '', 0 }
end
-- The result takes the place of the input, so there is always memory for it.
write_also_without_memory(COUNTS)
if is_first then
  -- By the finisher's time: whatever it writes once more, to a server that has lost this, is the same.
  local ended = string.format('%.0f', ms_of(entry_id) + tonumber(ARGV[14]))
  keep_result(task, state[3], ARGV[4], ARGV[5], now, tonumber(ARGV[6]), ended)
  redis.call('HSET', task, 'e', end_of_it)
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
return { (is_first or state[4] == end_of_it) and 1 or 0, is_first and state[2] or '', dropped }
