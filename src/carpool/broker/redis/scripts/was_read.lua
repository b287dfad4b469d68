-- Somebody has the results of these tasks: they go before others where there is no room for new ones (bytes.lua).
-- ARGV: now, ids of tasks
local GONE_READ_MAX = 1000
local now, kept_ms = clock(ARGV[1]), 0
for i = 2, #ARGV do
  local task = task_of(ARGV[i])
  local counted = redis.call('HGET', task, 'b')
  local size, gone_at = string.match(counted or '', '^(%d+) result_bytes:(%d+)$')
  if size then -- else it is gone, or was read before
    local part = 'read_bytes:' .. gone_at
    uncount_bytes(counted)
    count_bytes(part, size)
    redis.call('HSET', task, 'b', size .. ' ' .. part)
    redis.call('RPUSH', READ, ARGV[i])
    kept_ms = math.max(kept_ms, gone_at - now)
  end
end
-- Those whose time was over meanwhile, or that were deleted, are not needed. Of two that are read one after the other, the
-- second may be gone first: it is dropped behind the first. Where most are gone, the first goes to the end, so that those
-- behind it are found: nothing else bounds them.
local longest = 2 * math.max(count_of('read_bytes'), 0) / TASK_BYTES + GONE_READ_MAX
for _ = 1, 2 * #ARGV do
  local id = redis.call('LINDEX', READ, 0)
  local is_there = id and redis.call('HEXISTS', task_of(id), 'b') == 1
  if not id or (is_there and redis.call('LLEN', READ) <= longest) then
    break
  end
  redis.call('LPOP', READ)
  if is_there then
    redis.call('RPUSH', READ, id)
  end
end
if kept_ms > redis.call('PTTL', READ) then
  redis.call('PEXPIRE', READ, string.format('%.0f', kept_ms))
end
return redis.call('LLEN', READ)
