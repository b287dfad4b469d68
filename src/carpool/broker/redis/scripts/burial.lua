-- Prepended to the scripts that keep dead letters.
-- A letter's id is above all that its shard has given, also to letters that are gone: whoever reads on after the last
-- one he saw misses none. Modulo 16 it is the shard.
local EVICTED_AT_ONCE = 1000

local function bury(body, now, shard, letters_max)
  local id = math.max(count_of('letter') + 16, now * 16 + shard)
  local name = string.format('%.0f', id)
  -- First the counter: without memory this is refused, and nothing is half done.
  redis.call('HSET', COUNTS, 'letter', name)
  redis.call('ZADD', LETTERS, name, name)
  redis.call('HSET', LETTER_BODIES, name, body)
  local excess = math.min(redis.call('ZCARD', LETTERS) - letters_max, EVICTED_AT_ONCE)
  if excess > 0 then
    local oldest = redis.call('ZRANGE', LETTERS, 0, excess - 1)
    redis.call('ZREM', LETTERS, unpack(oldest))
    redis.call('HDEL', LETTER_BODIES, unpack(oldest))
  end
  return name
end

-- What is kept: length of the owner, owner, the letter as the batcher wrote it, the client's own bytes.
local function body_of(owner, letter, input)
  return struct.pack('>H', #owner) .. owner .. letter .. input
end
