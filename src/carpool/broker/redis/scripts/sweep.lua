-- Keep a shard tidy, a part of its streams at a time: drop those that are empty and consumers that left, count again,
-- forget old dead letters.
-- ARGV: where to go on (0: at the beginning), now, ms after which an idle consumer is gone, most dead letters, most bytes
--       of them, 1 if memory is short, ms that they are kept, ms after which their bytes are counted again
-- Returns: where to go on (0: that was the last part), entries held, unread ones, how many letters were dropped before
--          their time
local STREAMS_AT_ONCE, DROPPED_AT_ONCE = 64, 256
local now = clock(ARGV[2])
-- All but the letters is found out again, so what somebody put in its place may go.
local function heal(key, kind)
  local found = redis.pcall('TYPE', key)
  if not found.err and found.ok ~= kind and found.ok ~= 'none' then
    redis.call('DEL', key)
  end
end
if ARGV[1] == '0' then
  for _, key in ipairs({ COUNTS, LANES, SIZES, OPENERS, OPENED, LINES, LETTER_BODIES }) do
    heal(key, 'hash')
  end
  for _, key in ipairs({ LEASED, IDLE, LETTERS }) do
    heal(key, 'zset')
  end
end
write_also_without_memory(COUNTS)
local healed = {}
local found = redis.call('HSCAN', LANES, ARGV[1], 'COUNT', STREAMS_AT_ONCE)
local held, unread = 0, 0
for i = 1, #found[2], 2 do
  local field = found[2][i]
  local _, _, model = read_about(found[2][i + 1])
  if not healed[model] then
    healed[model] = true
    heal(heads_of(model), 'zset')
  end
  unread = unread + look_again(field)
  held = held + length_of(stream_of(field))
  ended(field, now)
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream_of(field), GROUP)
  for _, consumer in ipairs(consumers.err and {} or consumers) do
    -- name, <name>, pending, <number>, idle, <ms>; deleting one that has entries pending would lose them
    if consumer[4] > 0 then
      leased(field)
    elseif consumer[6] > tonumber(ARGV[3]) then
      redis.call('XGROUP', 'DELCONSUMER', stream_of(field), GROUP, consumer[2])
    end
  end
end
if ARGV[1] == '0' and found[1] == '0' then -- all of them at one moment: that is the truth
  redis.call('HSET', COUNTS, 'held', held, 'unread', unread)
end
drop_idle(DROPPED_AT_ONCE, now)
local bytes = { input_bytes = 0, result_bytes = 0 }
local known = redis.call('HGETALL', COUNTS)
for i = 1, #known, 2 do
  local total, gone_at = string.match(known[i], '^(%l+_bytes):(%d+)$')
  if total and tonumber(gone_at) <= now then
    redis.call('HDEL', COUNTS, known[i])
  elseif total then
    bytes[total] = bytes[total] + math.max(tonumber(known[i + 1]), 0)
  end
end
redis.call('HSET', COUNTS, 'input_bytes', bytes.input_bytes, 'result_bytes', bytes.result_bytes)

local too_old = (now - tonumber(ARGV[7])) * 16
local old = redis.call('ZRANGEBYSCORE', LETTERS, '-inf', too_old, 'LIMIT', 0, REMOVED_AT_ONCE)
remove_letters(old)
if math.abs(now - count_of('letters_counted')) >= tonumber(ARGV[8]) then
  local letter_bytes = 0
  for _, id in ipairs(redis.call('ZRANGE', LETTERS, 0, -1)) do
    letter_bytes = letter_bytes + redis.call('HSTRLEN', LETTER_BODIES, id)
  end
  redis.call('HSET', COUNTS, 'letter_bytes', letter_bytes, 'letters_counted', now)
end
local letter_bytes_max = tonumber(ARGV[5])
if ARGV[6] == '1' then -- half of them now, half of the rest at the next sweep
  letter_bytes_max = math.min(letter_bytes_max, math.floor(count_of('letter_bytes') / 2))
end
local dropped = evict(tonumber(ARGV[4]), letter_bytes_max)
return { tonumber(found[1]), count_of('held'), count_of('unread'), dropped }
