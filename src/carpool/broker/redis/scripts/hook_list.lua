-- Webhooks that wait, by host, without the outcomes.
-- ARGV: most of them, now
-- Returns: of each its task, URL, attempts, the last failure, ms since the outcome, ms until it is due, bytes of the outcome
local most, now, found = tonumber(ARGV[1]), clock(ARGV[2]), {}
for _, host in ipairs(redis.call('ZRANGE', HOOKS, 0, most - 1)) do
  local due = redis.call('ZRANGE', hooks_to(host), 0, most - #found - 1, 'WITHSCORES')
  for i = 1, #due, 2 do
    local hook = hook_of(due[i])
    local facts = redis.call('HMGET', hook, 'u', 'a', 'f', 't')
    if facts[1] then
      local age, wait = now - tonumber(facts[4]), tonumber(due[i + 1]) - now
      found[#found + 1] = { due[i], facts[1], facts[2], facts[3] or '', age, wait, redis.call('HSTRLEN', hook, 'r') }
    end
  end
  if #found >= most then
    break
  end
end
return found
