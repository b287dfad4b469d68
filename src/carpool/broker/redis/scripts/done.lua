-- Entries have their outcome: forget them.
-- ARGV: now, then for each stream: field, number of ids, ids
local now, at, removed, streams = clock(ARGV[1]), 2, 0, 0
write_also_without_memory(COUNTS)
while ARGV[at] do
  local number = tonumber(ARGV[at + 1])
  removed = removed + forget_entries(ARGV[at], { unpack(ARGV, at + 2, at + 1 + number) }, now)
  at, streams = at + 2 + number, streams + 1
end
drop_idle(2 * streams, now)
return removed
