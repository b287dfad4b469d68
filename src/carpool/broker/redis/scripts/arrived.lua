-- Entries were added by plain commands: count them, see to it that batchers find their stream, and ring.
-- KEYS: lanes, counts, stream
-- ARGV: field, model, how many were added, bell
-- Returns: entries held
local lanes, counts, stream = KEYS[1], KEYS[2], KEYS[3]
local added = tonumber(ARGV[3])
write_also_without_memory(counts)
if redis.call('HEXISTS', lanes, ARGV[1]) == 0 then
  redis.call('HSET', lanes, ARGV[1], ARGV[2])
end
redis.call('HINCRBY', counts, 'unread', added)
ring_if_new(stream, added, ARGV[4])
return redis.call('HINCRBY', counts, 'held', added)
