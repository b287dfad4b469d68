-- Keep the leases that a batcher still has. Their delivery counts do not change.
-- KEYS: counts
-- ARGV: prefix of the streams' names, consumer, then for each stream: field, number of ids, ids
-- Returns: field and id of each entry that another batcher has by now, or that is gone
local lost, at = {}, 3
while ARGV[at] do
  local stream, number = ARGV[1] .. ARGV[at], tonumber(ARGV[at + 1])
  for i = at + 2, at + 1 + number do
    local state = redis.pcall('XPENDING', stream, GROUP, ARGV[i], ARGV[i], 1)
    local mine = not state.err and state[1] and state[1][2] == ARGV[2]
    -- Redis renews nothing whose entry is gone from the stream.
    if not (mine and redis.call('XCLAIM', stream, GROUP, ARGV[2], 0, ARGV[i], 'JUSTID')[1]) then
      lost[#lost + 1] = ARGV[at]
      lost[#lost + 1] = ARGV[i]
    end
  end
  at = at + 2 + number
end
return lost
