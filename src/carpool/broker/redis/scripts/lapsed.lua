-- Whether a lease in this shard is over. What was looked at comes last the next time.
-- ARGV: ms after which a lease is over
-- Returns: 1 if so, else 0
local STREAMS_MAX = 256
write_also_without_memory(COUNTS)
for _, field in ipairs(redis.call('ZRANGE', LEASED, 0, STREAMS_MAX - 1)) do
  local over = redis.pcall('XPENDING', stream_of(field), GROUP, 'IDLE', ARGV[1], '-', '+', 1)
  if not over.err and #over > 0 then
    return 1
  end
  looked_at(field)
end
return 0
