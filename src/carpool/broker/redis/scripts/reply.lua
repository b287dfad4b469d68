-- Write a reply also at maxmemory: it is read and trimmed soon, and lets the requests it answers go.
-- KEYS: reply stream of a gateway
-- ARGV: reply
-- Returns: id of the entry; nothing if the gateway is gone
write_also_without_memory(KEYS[1] .. ':none')
return redis.call('XADD', KEYS[1], 'NOMKSTREAM', '*', 'r', ARGV[1])
