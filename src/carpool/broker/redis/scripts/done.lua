-- Entries have their outcome: forget them.
-- ARGV: now, then for each stream: field, number of ids, ids
local now, at, removed, streams = clock(ARGV[1]), 2, 0, 0
write_also_without_memory(COUNTS)
while ARGV[at] do
  local field, number = ARGV[at], tonumber(ARGV[at + 1])
  local ids = { unpack(ARGV, at + 2, at + 1 + number) }
  local acknowledged = redis.call('XACK', stream_of(field), GROUP, unpack(ids))
  local deleted = redis.call('XDEL', stream_of(field), unpack(ids))
  removed, streams = removed + deleted, streams + 1
  if deleted > acknowledged then -- a replica that was promoted may not know that they were taken
    look_again(field)
  else
    count(field, -deleted, 0)
  end
  ended(field, now)
  at = at + 2 + number
end
drop_idle(2 * streams, now)
return removed
