-- Take webhooks that are due, the oldest of each host first. Whoever takes one and dies lets it be due again.
-- ARGV: most of them, most of a host, ms for which nobody else gets them, now; by host, how many fewer of it
-- Returns: of each its task, URL, attempts before, ms since the outcome, bytes of that
local HOSTS_MAX, UNSURE_PAUSE_MS = 64, 500
local most, host_max, now, found, busy = tonumber(ARGV[1]), tonumber(ARGV[2]), clock(ARGV[4]), {}, {}
for i = 5, #ARGV, 2 do
  busy[ARGV[i]] = tonumber(ARGV[i + 1])
end
local over = string.format('%.0f', now + tonumber(ARGV[3]))
write_also_without_memory(COUNTS)
local hosts = redis.call('ZRANGE', HOOKS, '-inf', now, 'BYSCORE', 'LIMIT', 0, HOSTS_MAX + #ARGV / 2)
for _, host in ipairs(hosts) do
  local room = math.min(host_max - (busy[host] or 0), most - #found)
  if room > 0 then
    for _, id in ipairs(redis.call('ZRANGE', hooks_to(host), '-inf', now, 'BYSCORE', 'LIMIT', 0, room)) do
      local hook = hook_of(id)
      local facts = redis.call('HMGET', hook, 'u', 'a', 't')
      if facts[1] and is_unsure(id, now) then
        redis.call('ZADD', hooks_to(host), string.format('%.0f', now + UNSURE_PAUSE_MS), id)
      elseif facts[1] then
        redis.call('ZADD', hooks_to(host), over, id)
        redis.call('HSET', hook, 'l', over)
        found[#found + 1] = { id, facts[1], facts[2], now - tonumber(facts[3]), redis.call('HSTRLEN', hook, 'r') }
      else -- nobody sent it for a long time
        forget_hook(id, host)
      end
    end
    note_first(host)
  end
end
if redis.call('ZCARD', HOOKS) == 0 then
  redis.call('HDEL', COUNTS, 'hooks', 'hook_bytes') -- a wrong count mends itself
end
return found
