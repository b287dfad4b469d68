-- Results for requests that are the same were written into `kept`: count them, and see that there is room for others.
-- When `kept` has as many bytes as it may have, or is as old as results get, it becomes `kept-before`, and what that was
-- goes at once: one step for thousands of results, where one for each would hold up everybody who waits.
-- ARGV: most bytes of `kept` (0: drop all), ms that results are kept, how many were written, their bytes, those of the
-- smallest
-- Returns: bytes that are kept
-- It comes often, and needs little of what the others share (common.lua): Redis would make all of that anew each time.
local COUNTS = KEYS[1]
local PREFIX = string.sub(COUNTS, 1, -#'counts' - 1)
local KEPT, BEFORE = PREFIX .. 'kept', PREFIX .. 'kept-before'
local bytes_max, kept_ms = tonumber(ARGV[1]), tonumber(ARGV[2])
local written, size, least = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])

if bytes_max == 0 then
  redis.call('UNLINK', KEPT, BEFORE)
  redis.call('HDEL', COUNTS, 'cache_bytes', 'cache_before', 'cache_entries', 'cache_least')
  return 0
end
local known = redis.call('HMGET', COUNTS, 'cache_bytes', 'cache_before', 'cache_entries', 'cache_least')
local before = redis.call('HLEN', BEFORE) > 0 and tonumber(known[2] or '0') or 0
local bytes, entries_before = tonumber(known[1] or '0') - tonumber(known[2] or '0'), tonumber(known[3] or '0')
local entries, ends_in = redis.call('HLEN', KEPT), redis.call('PTTL', KEPT)
if ends_in == -1 then
  -- It is new: whoever writes first makes it. Its last result may be written when half of this time is over.
  redis.call('PEXPIRE', KEPT, 2 * kept_ms)
  ends_in, bytes, entries_before = 2 * kept_ms, 0, 0
else
  least = math.min(least, tonumber(known[4] or '0'))
end
local added = math.max(0, entries - entries_before)
if added < written then
  -- Some took the place of older ones, of which all that is known is how small they were at least.
  bytes = bytes + size - (written - added) * least
else
  bytes = bytes + math.floor(size / written * added)
end
if entries > 0 and (bytes >= bytes_max or ends_in <= kept_ms) then
  redis.call('UNLINK', BEFORE)
  if bytes < 2 * bytes_max then
    redis.call('RENAME', KEPT, BEFORE)
    before = bytes
  else
    -- Many were written before this ran, for Redis did not know the script.
    redis.call('UNLINK', KEPT)
    before = 0
  end
  entries = 0
end
if entries == 0 then
  bytes = 0
end
redis.call('HSET', COUNTS, 'cache_bytes', bytes + before, 'cache_before', before, 'cache_entries', entries,
  'cache_least', least)
return bytes + before
