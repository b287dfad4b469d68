-- Remove a task in any state, and its entry. Whoever took it is told, and finds no task for its result.
-- ARGV: id of the task
-- Returns: names of the gateways where somebody waits for it, 1 if it had no result; nil if there is no such task
local task = task_of(ARGV[1])
local state = redis.call('HMGET', task, 's', 'f', 'e', 'w', 'b', 'n')
if not state[1] then
  return false
end
redis.call('DEL', task)
uncount_bytes(state[5])
if state[1] == 'P' then
  local field, id = state[2], state[3]
  local lease = lease_of(field, id)
  if lease then
    nobody_waits({ { field, id, lease[2] } })
  elseif redis.pcall('XDEL', stream_of(field), id) == 1 then
    leaves_line(field, state[6])
    look_again(field)
  end
end
return { state[4] or '', state[1] == 'P' and 1 or 0 }
