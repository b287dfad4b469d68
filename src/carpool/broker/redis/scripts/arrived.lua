-- Entries were added by plain commands: count them, see to it that batchers find their stream, and ring.
-- ARGV: field, what is said of it, how many were added, now, owner of the first
-- Returns: entries held, lanes that count against the bound
write_also_without_memory(COUNTS)
added(ARGV[1], ARGV[2], tonumber(ARGV[3]), clock(ARGV[4]), ARGV[5])
return { count_of('held'), redis.call('HLEN', OPENERS) }
