-- Keep the leases that a batcher still has. Their delivery counts do not change.
-- ARGV: consumer, then for each stream: field, number of ids, ids
-- Returns: field and id of each entry that another batcher has by now, or that is gone
local lost, at = {}, 2
while ARGV[at] do
  local stream, number = stream_of(ARGV[at]), tonumber(ARGV[at + 1])
  for i = at + 2, at + 1 + number do
    local state = redis.pcall('XPENDING', stream, GROUP, ARGV[i], ARGV[i], 1)
    local mine = not state.err and state[1] and state[1][2] == ARGV[1]
    -- Redis renews nothing whose entry is gone from the stream.
    if not (mine and redis.call('XCLAIM', stream, GROUP, ARGV[1], 0, ARGV[i], 'JUSTID')[1]) then
      lost[#lost + 1] = ARGV[at]
      lost[#lost + 1] = ARGV[i]
    end
  end
  at = at + 2 + number
end
return lost
