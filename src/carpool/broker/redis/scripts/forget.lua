-- Remove a task in any state, and its entry. Whoever took it is told, and finds no task for its result.
-- ARGV: id of the task
-- Returns: names of the gateways where somebody waits for it, 1 if it had no result; nil if there is no such task
local task = task_of(ARGV[1])
local state = redis.call('HMGET', task, 's', 'f', 'e', 'w', 'b')
if not state[1] then
  return false
end
redis.call('DEL', task)
uncount_bytes(state[5])
if state[1] == 'P' then
  local stream, id = stream_of(state[2]), state[3]
  local pending = redis.pcall('XPENDING', stream, GROUP, id, id, 1)
  if not pending.err and pending[1] then
    nobody_waits({ { state[2], id, pending[1][2] } })
  elseif not pending.err and redis.call('XDEL', stream, id) == 1 then
    look_again(state[2])
  end
end
return { state[4] or '', state[1] == 'P' and 1 or 0 }
