-- Remove one dead letter, or all of a shard.
-- ARGV: id ('' for all)
-- Returns: how many there were
if ARGV[1] == '' then
  local number = redis.call('ZCARD', LETTERS)
  redis.call('UNLINK', LETTERS, LETTER_BODIES)
  return number
end
redis.call('HDEL', LETTER_BODIES, ARGV[1])
return redis.call('ZREM', LETTERS, ARGV[1])
