-- Let other batchers have entries that were not sent: their leases end now, and these deliveries do not count.
-- ARGV: consumer, then for each stream: field, number of ids, ids
local LONG_AGO_MS = 86400000
local at = 2
while ARGV[at] do
  local field, number = ARGV[at], tonumber(ARGV[at + 1])
  for i = at + 2, at + 1 + number do
    local lease = lease_of(field, ARGV[i])
    if lease and lease[2] == ARGV[1] then
      local stream, deliveries = stream_of(field), math.max(lease[4] - 1, 0)
      redis.call('XCLAIM', stream, GROUP, ARGV[1], 0, ARGV[i], 'IDLE', LONG_AGO_MS, 'RETRYCOUNT', deliveries, 'JUSTID')
    end
  end
  at = at + 2 + number
end
return 0
