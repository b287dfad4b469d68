-- Where a task is, for operators.
-- ARGV: id of the task, ms of a lease, now
-- Returns: P (it waits), R (a batcher has it), S or F; ms from its submission to its result, or until now; the result of
--          one that failed; what its client calls itself ('' if it does not say); nil if there is no such task
local state = redis.call('HMGET', task_of(ARGV[1]), 's', 't', 'f', 'e', 'c')
local status, field, id = state[1], state[3], state[4]
if not status then
  return false
end
local ended = status == 'P' and clock(ARGV[3]) or tonumber(state[2])
if status == 'P' then
  local lease = lease_of(field, id)
  if lease and lease[3] < tonumber(ARGV[2]) then
    status = 'R'
  end
end
local problem = status == 'F' and redis.call('HGET', task_of(ARGV[1]), 'r') or ''
return { status, id and ended - ms_of(id) or 0, problem, state[5] or '' }
