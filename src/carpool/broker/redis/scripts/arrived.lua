-- Entries were added by plain commands: count them, see to it that batchers find their streams, and wake them.
-- ARGV: now, then for each stream: field, what is said of it, how many were added, owner of the first
-- Returns: entries held, lanes that count against the bound
local now = clock(ARGV[1])
write_also_without_memory(COUNTS)
for at = 2, #ARGV, 4 do
  added(ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), now, ARGV[at + 3])
end
return { count_of('held'), redis.call('HLEN', OPENERS) }
