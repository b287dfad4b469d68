-- Let other batchers have entries: their leases end now, and these deliveries do not count. Batchers are woken up.
-- ARGV: consumer, then for each stream: field, number of ids, of each entry: its id, what is carried along (leases.py)
local at = 2
while ARGV[at] do
  local field, number, released = ARGV[at], tonumber(ARGV[at + 1]), 0
  for i = at + 2, at + 2 * number, 2 do
    local id, carried = ARGV[i], tonumber(ARGV[i + 1])
    local lease = lease_of(field, id)
    if lease and lease[2] == ARGV[1] then
      local count = carried * CARRIED_FROM + math.max(deliveries_of(lease) - 1, 0)
      local lapse = { 'IDLE', GIVEN_BACK_MS, 'RETRYCOUNT', count, 'JUSTID' }
      redis.call('XCLAIM', stream_of(field), GROUP, ARGV[1], 0, id, unpack(lapse))
      released = released + 1
    end
  end
  if released > 0 then
    redis.call('SPUBLISH', WAKEUP, 'back')
  end
  at = at + 2 + 2 * number
end
return 0
