-- Keep a shard tidy, a part of its streams at a time: drop those that are empty and consumers that left, count again,
-- forget old dead letters.
-- ARGV: where to go on (0: at the beginning), now, ms after which an idle consumer is gone, ms that letters are kept
-- Returns: where to go on (0: that was the last part), entries held, unread ones
local STREAMS_AT_ONCE, DROPPED_AT_ONCE, LETTERS_AT_ONCE = 64, 256, 1000
local now = clock(ARGV[2])
write_also_without_memory(COUNTS)
local found = redis.call('HSCAN', LANES, ARGV[1], 'COUNT', STREAMS_AT_ONCE)
local held, unread = 0, 0
for i = 1, #found[2], 2 do
  local field = found[2][i]
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
local too_old = (now - tonumber(ARGV[4])) * 16
local old = redis.call('ZRANGE', LETTERS, '-inf', too_old, 'BYSCORE', 'LIMIT', 0, LETTERS_AT_ONCE)
if #old > 0 then
  redis.call('ZREM', LETTERS, unpack(old))
  redis.call('HDEL', LETTER_BODIES, unpack(old))
end
return { tonumber(found[1]), count_of('held'), count_of('unread') }
