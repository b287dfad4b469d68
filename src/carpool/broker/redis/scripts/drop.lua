-- Remove one dead letter, or all of a shard.
-- KEYS: letters, letter bodies
-- ARGV: id ('' for all)
-- Returns: how many there were
if ARGV[1] == '' then
  local number = redis.call('ZCARD', KEYS[1])
  redis.call('UNLINK', KEYS[1], KEYS[2])
  return number
end
redis.call('HDEL', KEYS[2], ARGV[1])
return redis.call('ZREM', KEYS[1], ARGV[1])
