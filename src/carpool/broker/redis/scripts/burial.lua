-- Prepended to the scripts that keep or remove dead letters. Beyond their bounds, in number and in bytes, the oldest go.
-- A letter's id is above all that its shard has given, also to letters that are gone: whoever reads on after the last
-- one he saw misses none. Modulo 16 it is the shard.
local REMOVED_AT_ONCE = 1000

-- Returns how many of them there were.
local function remove_letters(ids)
  if #ids == 0 then
    return 0
  end
  local bytes = 0
  for _, id in ipairs(ids) do
    bytes = bytes + redis.call('HSTRLEN', LETTER_BODIES, id)
  end
  redis.call('HDEL', LETTER_BODIES, unpack(ids))
  if bytes > 0 then -- Redis takes no -0
    redis.call('HINCRBY', COUNTS, 'letter_bytes', -bytes)
  end
  return redis.call('ZREM', LETTERS, unpack(ids))
end

-- Returns how many went.
local function evict(letters_max, bytes_max)
  local number, bytes = redis.call('ZCARD', LETTERS), count_of('letter_bytes')
  local oldest = {}
  while number > 0 and (number > letters_max or bytes > bytes_max) and #oldest < REMOVED_AT_ONCE do
    local id = redis.call('ZRANGE', LETTERS, #oldest, #oldest)[1]
    oldest[#oldest + 1] = id
    number, bytes = number - 1, bytes - redis.call('HSTRLEN', LETTER_BODIES, id)
  end
  return remove_letters(oldest)
end

-- While memory is short there are to be no more bytes of letters than there are. One that is above the bound by itself
-- is not kept: it would cost all the others. Returns how many were dropped, this one or old ones.
local function bury(body, now, shard, letters_max, bytes_max, is_memory_short)
  if is_memory_short then
    bytes_max = math.min(bytes_max, count_of('letter_bytes'))
  end
  if #body > bytes_max then
    return 1
  end
  local id = math.max(count_of('letter') + 16, now * 16 + shard)
  local name = string.format('%.0f', id)
  -- First the counter: without memory this is refused, and nothing is half done.
  redis.call('HSET', COUNTS, 'letter', name)
  redis.call('ZADD', LETTERS, name, name)
  redis.call('HSET', LETTER_BODIES, name, body)
  redis.call('HINCRBY', COUNTS, 'letter_bytes', #body)
  return evict(letters_max, bytes_max)
end
