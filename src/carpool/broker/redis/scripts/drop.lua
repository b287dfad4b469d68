-- Remove one dead letter, or all of a shard.
-- ARGV: id ('' for all)
-- Returns: how many there were
if ARGV[1] ~= '' then
  return remove_letters({ ARGV[1] })
end
local number = redis.call('ZCARD', LETTERS)
redis.call('UNLINK', LETTERS, LETTER_BODIES)
redis.call('HDEL', COUNTS, 'letter_bytes')
return number
