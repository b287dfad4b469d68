-- The heads of some dead letters of a shard, the oldest first: never their inputs.
-- ARGV: id after which to begin, most letters, most bytes to look through (one may be of any size)
-- Returns: how many are kept in the shard, the highest id it ever gave, then for each: id, head, bytes of
--          parameters and input
local answer = { redis.call('ZCARD', LETTERS), redis.call('HGET', COUNTS, 'letter') or '0' }
local bytes = 0
for _, id in ipairs(redis.call('ZRANGEBYSCORE', LETTERS, '(' .. ARGV[1], '+inf', 'LIMIT', 0, ARGV[2])) do
  bytes = bytes + redis.call('HSTRLEN', LETTER_BODIES, id)
  if #answer > 2 and bytes > tonumber(ARGV[3]) then
    break
  end
  local body = redis.call('HGET', LETTER_BODIES, id)
  if body then
    local owner_length = struct.unpack('>H', body)
    local head_length = struct.unpack('>I4', body, 3 + owner_length)
    local head_at = 11 + owner_length
    answer[#answer + 1] = id
    answer[#answer + 1] = string.sub(body, head_at, head_at + head_length - 1)
    answer[#answer + 1] = #body - head_at - head_length + 1
  end
end
return answer
