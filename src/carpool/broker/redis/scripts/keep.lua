-- Keep results for requests that are the same. Those whose time is over go, and the oldest make room.
-- `results` has keys with their sizes behind them, by when they are over; Redis itself drops each result then.
-- ARGV: now, most bytes, ms that they are kept; of each result: key of 32 bytes, value
-- Returns: bytes that are kept
-- What is kept begins with the time in ms, in 13 digits: whoever reads it must know how old it is.
-- It comes often, and needs little of what the others share (common.lua): Redis would make all of that anew each time.
local COUNTS = KEYS[1]
local PREFIX = string.sub(COUNTS, 1, -#'counts' - 1)
local RESULTS, KEY_BYTES, ENTRY_BYTES, DROPPED_MAX = PREFIX .. 'results', 32, 300, 256
local now, bytes_max, kept_ms = clock(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])

local function result_of(key)
  return PREFIX .. 'result:' .. key
end

local function size_in(member)
  return tonumber(string.sub(member, KEY_BYTES + 1))
end

-- Without entries the count is 0, whatever it says.
local bytes = 0
if redis.call('EXISTS', RESULTS) == 1 then
  bytes = math.max(tonumber(redis.call('HGET', COUNTS, 'cache_bytes') or '0'), 0)
end
local over = redis.call('ZRANGEBYSCORE', RESULTS, '-inf', now, 'LIMIT', 0, DROPPED_MAX)
for _, member in ipairs(over) do
  redis.call('ZREM', RESULTS, member)
  bytes = bytes - size_in(member)
end

local dropped = 0
local function make_room(size)
  while bytes > 0 and bytes + size > bytes_max and dropped < DROPPED_MAX do
    local member = redis.call('ZPOPMIN', RESULTS)[1]
    if not member then
      bytes = 0
      return
    end
    redis.call('UNLINK', result_of(string.sub(member, 1, KEY_BYTES)))
    bytes, dropped = bytes - size_in(member), dropped + 1
  end
end

for i = 4, #ARGV, 2 do
  local key, value = ARGV[i], string.format('%013.0f', now) .. ARGV[i + 1]
  local size, result = #value + ENTRY_BYTES, result_of(key)
  local older = redis.call('STRLEN', result)
  if older > 0 and redis.call('ZREM', RESULTS, key .. (older + ENTRY_BYTES)) == 1 then
    bytes = bytes - older - ENTRY_BYTES
  end
  make_room(size)
  if bytes + size <= bytes_max then
    redis.call('SET', result, value, 'PX', kept_ms)
    bytes = bytes + size * redis.call('ZADD', RESULTS, now + kept_ms, key .. size)
  elseif older > 0 then
    redis.call('UNLINK', result)
  end
end
redis.call('HSET', COUNTS, 'cache_bytes', bytes)
return bytes
