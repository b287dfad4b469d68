-- Somebody has the results of these tasks: they go before others where there is no room for new ones (bytes.lua).
-- ARGV: now, ids of tasks
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
    redis.call('ZADD', READ, gone_at, ARGV[i])
    kept_ms = math.max(kept_ms, gone_at - now)
  end
end
redis.call('ZREMRANGEBYSCORE', READ, '-inf', now)
if kept_ms > redis.call('PTTL', READ) then
  redis.call('PEXPIRE', READ, string.format('%.0f', kept_ms))
end
return redis.call('ZCARD', READ)
