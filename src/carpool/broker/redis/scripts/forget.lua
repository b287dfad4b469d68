-- Remove a task in any state, and its entry. The batcher that has it is told, and finds no task for its result.
-- ARGV: id of the task, now, 1 if it was never accepted: then its webhook goes too, the receipt for its end
-- Returns: names of the gateways where somebody waits for it; if it had no result its owner, its model, its age in ms and
--          its field; nil if there is no such task
local task, hook = task_of(ARGV[1]), hook_of(ARGV[1])
local state = redis.call('HMGET', task, 's', 'f', 'e', 'w', 'b', 'n', 'o')
redis.call('ZREM', UNSURE, ARGV[1])
if ARGV[3] == '1' then
  local url = redis.call('HGET', hook, 'u')
  if url then
    forget_hook(ARGV[1], host_of(url))
  end
end
if not state[1] then
  return false
end
drop_task(task, state[3], state[5])
local ended = {}
if state[1] == 'P' then
  local field, id = state[2], state[3]
  local _, _, model = about(field)
  ended = { state[7] or '', model or '', id and clock(ARGV[2] or '') - ms_of(id) or 0, field or '' }
  note_ends(ARGV[4], { ARGV[1], unpack(ended) })
  local lease = lease_of(field, id)
  if lease then
    nobody_waits({ { field, id, lease[2] } })
  elseif redis.pcall('XDEL', stream_of(field), id) == 1 then
    leaves_line(field, state[6])
    look_again(field)
  end
end
return { state[4] or '', unpack(ended) }
