-- The rate limits of some owners, each a token bucket that all gateways share (admission/limits.py says why this is right).
-- A gateway asks for calls that wait, and for a lease: tokens that it uses later. Both are taken from the bucket now.
-- Times are whole eighths of a microsecond since START_S: exact in Lua, also when they are added up.
-- KEYS: the owners' hashes: `full`, when the bucket is full again; `at`, when that was written
-- ARGV: now; then for each owner: time in which a token comes back, how many the bucket holds, how many of them a lease
--       leaves in it, need: calls that wait, want: tokens to lease, tokens that each call takes
-- Returns: for each owner: granted, leased, time until the bucket is full
local START_S, SECOND = 1700000000, 8000000
local now
if ARGV[1] ~= '' then
  now = (tonumber(ARGV[1]) - START_S * 1000) * (SECOND / 1000)
else
  local time = redis.call('TIME')
  now = (tonumber(time[1]) - START_S) * SECOND + tonumber(time[2]) * (SECOND / 1000000)
end

local answer = {}
for number, key in ipairs(KEYS) do
  local first = 2 + (number - 1) * 6
  local interval, capacity, burst = tonumber(ARGV[first]), tonumber(ARGV[first + 1]), tonumber(ARGV[first + 2])
  local need, want, cost = tonumber(ARGV[first + 3]), tonumber(ARGV[first + 4]), tonumber(ARGV[first + 5])
  -- Also without memory: it removes nothing, and lets what follows be written.
  redis.call('HDEL', key, '')
  local known, ahead = redis.call('HMGET', key, 'full', 'at'), 0
  if known[1] then
    -- If the clock was set back meanwhile, no time has passed.
    ahead = math.max(0, tonumber(known[1]) - math.max(now, tonumber(known[2])))
  end
  local there, granted, leased = math.floor((capacity * interval - ahead) / interval), 0, 0
  if there >= math.min(cost, burst) then
    granted = math.min(need, math.max(1, math.floor(there / cost)))
  end
  if granted == need then
    leased = math.max(0, math.min(want, there - granted * cost - burst))
  end
  ahead = ahead + (granted * cost + leased) * interval
  redis.call('HSET', key, 'full', string.format('%.0f', now + ahead), 'at', string.format('%.0f', now))
  -- A minute more: a key may expire by another clock than the one that is read here.
  redis.call('PEXPIRE', key, math.ceil(ahead / (SECOND / 1000)) + 60000)
  answer[#answer + 1] = granted
  answer[#answer + 1] = leased
  answer[#answer + 1] = ahead
end
return answer
