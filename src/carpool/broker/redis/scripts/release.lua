-- Let other batchers have entries that were not sent: their leases end now, and these deliveries do not count.
-- ARGV: consumer, then for each stream: field, number of ids, ids
local LONG_AGO_MS = 86400000
local at = 2
while ARGV[at] do
  local stream, number = stream_of(ARGV[at]), tonumber(ARGV[at + 1])
  for i = at + 2, at + 1 + number do
    local state = redis.pcall('XPENDING', stream, GROUP, ARGV[i], ARGV[i], 1)
    if not state.err and state[1] and state[1][2] == ARGV[1] then
      local deliveries = math.max(state[1][4] - 1, 0)
      redis.call('XCLAIM', stream, GROUP, ARGV[1], 0, ARGV[i], 'IDLE', LONG_AGO_MS, 'RETRYCOUNT', deliveries, 'JUSTID')
    end
  end
  at = at + 2 + number
end
return 0
