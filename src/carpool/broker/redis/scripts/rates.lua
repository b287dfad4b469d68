-- The rate limits of some owners, each a bucket that all gateways share (admission/leases.py says why this is right).
-- A gateway tells what it used of its lease, which is taken from the bucket now; asks for those who wait; and for a lease,
-- which takes nothing, and is taken whole if nothing is heard of it.
-- Times are whole eighths of a microsecond since START_S: exact in Lua, also when they are added up.
-- KEYS: the owners' hashes: `full`, when the bucket is full again; for each gateway with a lease 'g' and its name: how many
--       are leased, a space, until when; `debt`: 0, a space, and the last time at which what was borrowed makes it full
-- ARGV: now, the gateway, ms that a lease is remembered; then for each owner: time in which a place comes back, places, most
--       that all may have leased, used (-1: all of the lease), kept of it, need: calls that wait, want, places that each of
--       these takes, places that must be there for it
-- Returns: for each owner: granted, leased, 1 if there was a lease to keep, time until the bucket is full
local START_S, SECOND = 1700000000, 8000000
-- No call counts as more.
local DEBT_MAX = 65536
local now
if ARGV[1] ~= '' then
  now = (tonumber(ARGV[1]) - START_S * 1000) * (SECOND / 1000)
else
  local time = redis.call('TIME')
  now = (tonumber(time[1]) - START_S) * SECOND + tonumber(time[2]) * (SECOND / 1000000)
end
local own, kept_for = 'g' .. ARGV[2], tonumber(ARGV[3]) * (SECOND / 1000)

local answer = {}
for number, key in ipairs(KEYS) do
  local at = 4 + (number - 1) * 9
  local interval, places, leased_max = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local used, kept = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  local need, want = tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6])
  local cost, fit = tonumber(ARGV[at + 7]), tonumber(ARGV[at + 8])
  -- Also without memory: it removes nothing, and lets what follows be written.
  redis.call('HDEL', key, '')
  local full, debt, others, lease, charge = now, nil, 0, nil, 0
  local known = redis.call('HGETALL', key)
  for i = 1, #known, 2 do
    if known[i] == 'full' then
      full = math.max(now, tonumber(known[i + 1]))
    else
      local count, ends = string.match(known[i + 1], '^(%d+) (-?%d+)$')
      count, ends = tonumber(count), tonumber(ends)
      if known[i] == 'debt' then
        if ends <= now + places * interval or ends > now + (places + DEBT_MAX) * interval then -- paid, or the clock was set back
          redis.call('HDEL', key, 'debt')
        else
          debt = ends
        end
      elseif ends <= now or ends > now + kept_for then -- its gateway is gone, or the clock was set back
        charge = charge + count
        redis.call('HDEL', key, known[i])
      elseif known[i] == own then
        lease = count
      else
        others = others + count
      end
    end
  end
  local is_kept = 0
  if lease and used >= 0 then
    is_kept = 1
    used = math.min(used, lease)
    kept = math.min(kept, lease - used)
    charge = charge + used
  else
    kept = 0
    charge = charge + (lease or 0)
  end
  -- If it is later than all of this can make it, the clock was set back, or the limit is another one now.
  full = math.min(full + charge * interval, (debt or now + places * interval) + leased_max * interval)
  local there, granted = math.floor((now + places * interval - full) / interval), 0
  if there >= fit then
    granted = math.min(need, math.max(1, math.floor(there / cost)))
  end
  full = full + granted * cost * interval
  if granted * cost > there then
    redis.call('HSET', key, 'debt', string.format('0 %.0f', full))
  end
  local leased = 0
  if granted == need then
    local free = math.floor((now + places * interval - full) / interval)
    leased = math.max(0, math.min(want, math.min(leased_max, free) - others - kept))
  end
  if kept + leased > 0 then
    redis.call('HSET', key, own, string.format('%d %.0f', kept + leased, now + kept_for))
  elseif lease then
    redis.call('HDEL', key, own)
  end
  redis.call('HSET', key, 'full', string.format('%.0f', full))
  redis.call('PEXPIRE', key, math.ceil((full - now + kept_for) / (SECOND / 1000)))
  answer[#answer + 1] = granted
  answer[#answer + 1] = leased
  answer[#answer + 1] = is_kept
  answer[#answer + 1] = full - now
end
return answer
