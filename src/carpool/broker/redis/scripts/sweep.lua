-- Keep a shard tidy: drop streams that are empty and consumers that left, count again, forget old dead letters.
-- KEYS: lanes, counts, letters, letter bodies
-- ARGV: prefix of the streams' names, now, ms after which an idle consumer is gone, most dead letters, most bytes of
--       them, 1 if memory is short, ms that they are kept, ms after which their bytes are counted again
-- Returns: entries held, unread ones, how many letters were dropped before their time
local lanes, counts, prefix = KEYS[1], KEYS[2], ARGV[1]
local now = clock(ARGV[2])
write_also_without_memory(lanes)
local held, unread = 0, 0
for _, field in ipairs(redis.call('HKEYS', lanes)) do
  local stream = prefix .. field
  local length = redis.call('XLEN', stream)
  if length == 0 then
    drop_if_idle(lanes, field, stream, now)
  else
    local pending = group_of(stream)
    if not pending then -- somebody deleted the stream, and it came back without its group
      redis.call('XGROUP', 'CREATE', stream, GROUP, '0')
      pending = 0
    end
    held = held + length
    unread = unread + math.max(length - pending, 0)
    for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', stream, GROUP)) do
      -- name, <name>, pending, <number>, idle, <ms>; deleting one that has entries pending would lose them
      if consumer[4] == 0 and consumer[6] > tonumber(ARGV[3]) then
        redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, consumer[2])
      end
    end
  end
end
local bytes = { input_bytes = 0, result_bytes = 0 }
local known = redis.call('HGETALL', counts)
for i = 1, #known, 2 do
  local total, gone_at = string.match(known[i], '^(%l+_bytes):(%d+)$')
  if total and tonumber(gone_at) <= now then
    redis.call('HDEL', counts, known[i])
  elseif total then
    bytes[total] = bytes[total] + math.max(tonumber(known[i + 1]), 0)
  end
end
local task_bytes = { 'input_bytes', bytes.input_bytes, 'result_bytes', bytes.result_bytes }
redis.call('HSET', counts, 'held', held, 'unread', unread, unpack(task_bytes))

local letters, bodies = KEYS[3], KEYS[4]
local too_old = (now - tonumber(ARGV[7])) * 16
local old = redis.call('ZRANGEBYSCORE', letters, '-inf', too_old, 'LIMIT', 0, REMOVED_AT_ONCE)
remove_letters(letters, bodies, counts, old)
if math.abs(now - count_of(counts, 'letters_counted')) >= tonumber(ARGV[8]) then
  local letter_bytes = 0
  for _, id in ipairs(redis.call('ZRANGE', letters, 0, -1)) do
    letter_bytes = letter_bytes + redis.call('HSTRLEN', bodies, id)
  end
  redis.call('HSET', counts, 'letter_bytes', letter_bytes, 'letters_counted', now)
end
local letter_bytes_max = tonumber(ARGV[5])
if ARGV[6] == '1' then -- half of them now, half of the rest at the next sweep
  letter_bytes_max = math.min(letter_bytes_max, math.floor(count_of(counts, 'letter_bytes') / 2))
end
return { held, unread, evict(letters, bodies, counts, tonumber(ARGV[4]), letter_bytes_max) }
