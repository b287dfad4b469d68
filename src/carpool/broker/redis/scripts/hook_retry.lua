-- Let webhooks be due now, but for those that somebody is sending.
-- ARGV: id of a task, or '' and: host of those that are not due yet, how many of these to pass over, most to look at; now
-- Returns: how many are due now, how many are being sent
local now, retried, leased = clock(ARGV[5]), 0, 0
local ids = { ARGV[1] }
if ARGV[1] == '' then
  local later = '(' .. string.format('%.0f', now)
  ids = redis.call('ZRANGE', hooks_to(ARGV[2]), later, '+inf', 'BYSCORE', 'LIMIT', ARGV[3], ARGV[4])
end
for _, id in ipairs(ids) do
  local facts = redis.call('HMGET', hook_of(id), 'u', 'l')
  if facts[1] then
    if tonumber(facts[2] or '0') > now then
      leased = leased + 1
    else
      let_be_due(id, host_of(facts[1]), now)
      retried = retried + 1
    end
  end
end
return { retried, leased }
