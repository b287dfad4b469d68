-- Prepended to the scripts that give a task its result, behind bytes.lua.
local function keep_result(task, counted, status, result, now, kept_ms)
  local part = part_of('result_bytes', now, kept_ms)
  local size = #result + redis.call('HSTRLEN', task, 'c') + TASK_BYTES -- its client's name for itself stays with it
  uncount_bytes(counted)
  count_bytes(part, size)
  redis.call('HSET', task, 's', status, 'r', result, 't', now, 'b', size .. ' ' .. part)
  redis.call('HDEL', task, 'f', 'w') -- the id of its entry tells when it was submitted
  redis.call('PEXPIRE', task, kept_ms)
end

local function forget_entry(field, entry_id, now)
  local stream = stream_of(field)
  local was_pending = redis.call('XACK', stream, GROUP, entry_id) == 1
  if redis.call('XDEL', stream, entry_id) == 1 then
    if was_pending then
      count(field, -1, 0)
    else -- a replica that took over may not know that it was taken
      look_again(field)
    end
    ended(field, now)
  end
end
