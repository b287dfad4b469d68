-- Remove one dead letter, or all of a shard.
-- KEYS: letters, letter bodies, counts
-- ARGV: id ('' for all)
-- Returns: how many there were
if ARGV[1] ~= '' then
  return remove_letters(KEYS[1], KEYS[2], KEYS[3], { ARGV[1] })
end
local number = redis.call('ZCARD', KEYS[1])
redis.call('UNLINK', KEYS[1], KEYS[2])
redis.call('HDEL', KEYS[3], 'letter_bytes')
return number
