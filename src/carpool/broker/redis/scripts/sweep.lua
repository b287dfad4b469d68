-- Keep a shard tidy: drop streams that are empty and consumers that left, count again, forget old dead letters.
-- KEYS: lanes, counts, letters, letter bodies
-- ARGV: prefix of the streams' names, now, ms after which an idle consumer is gone, ms that dead letters are kept
-- Returns: entries held, unread ones
local IDS_AT_ONCE = 1000
local lanes, counts, prefix = KEYS[1], KEYS[2], ARGV[1]
local now = clock(ARGV[2])
write_also_without_memory(lanes)
local held, unread = 0, 0
for _, field in ipairs(redis.call('HKEYS', lanes)) do
  local stream = prefix .. field
  local length = redis.call('XLEN', stream)
  if length == 0 then
    drop_if_idle(lanes, field, stream, now)
  else
    local pending = group_of(stream)
    if not pending then -- somebody deleted the stream, and it came back without its group
      redis.call('XGROUP', 'CREATE', stream, GROUP, '0')
      pending = 0
    end
    held = held + length
    unread = unread + math.max(length - pending, 0)
    for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', stream, GROUP)) do
      -- name, <name>, pending, <number>, idle, <ms>; deleting one that has entries pending would lose them
      if consumer[4] == 0 and consumer[6] > tonumber(ARGV[3]) then
        redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, consumer[2])
      end
    end
  end
end
redis.call('HSET', counts, 'held', held, 'unread', unread)
local too_old = (now - tonumber(ARGV[4])) * 16
local old = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', too_old, 'LIMIT', 0, IDS_AT_ONCE)
if #old > 0 then
  redis.call('ZREM', KEYS[3], unpack(old))
  redis.call('HDEL', KEYS[4], unpack(old))
end
return { held, unread }
