-- Keep the leases that a batcher still has. Their delivery counts do not change.
-- ARGV: consumer, then for each stream: field, number of ids, ids
-- Returns: field and id of each entry that another batcher has by now, or that is gone
local lost, at = {}, 2
while ARGV[at] do
  local field, number = ARGV[at], tonumber(ARGV[at + 1])
  for i = at + 2, at + 1 + number do
    local lease = lease_of(field, ARGV[i])
    local mine = lease and lease[2] == ARGV[1]
    -- Redis renews nothing whose entry is gone from the stream.
    if not (mine and redis.call('XCLAIM', stream_of(field), GROUP, ARGV[1], 0, ARGV[i], 'JUSTID')[1]) then
      lost[#lost + 1] = field
      lost[#lost + 1] = ARGV[i]
    end
  end
  at = at + 2 + number
end
return lost
