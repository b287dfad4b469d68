-- Let other batchers have entries that were not sent: their leases end now, and these deliveries do not count.
-- KEYS: counts
-- ARGV: prefix of the streams' names, consumer, then for each stream: field, number of ids, ids
local LONG_AGO_MS = 86400000
local at = 3
while ARGV[at] do
  local stream, number = ARGV[1] .. ARGV[at], tonumber(ARGV[at + 1])
  for i = at + 2, at + 1 + number do
    local state = redis.pcall('XPENDING', stream, GROUP, ARGV[i], ARGV[i], 1)
    if not state.err and state[1] and state[1][2] == ARGV[2] then
      local deliveries = math.max(state[1][4] - 1, 0)
      redis.call('XCLAIM', stream, GROUP, ARGV[2], 0, ARGV[i], 'IDLE', LONG_AGO_MS, 'RETRYCOUNT', deliveries, 'JUSTID')
    end
  end
  at = at + 2 + number
end
return 0
