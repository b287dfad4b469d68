-- What waits in a shard.
-- KEYS: lanes, counts
-- ARGV: prefix of the streams' names, now, ms after which a lease is over
-- Returns: now, unread entries, 1 if a lease is over (else 0), then for each stream with unread entries: field, model,
--          id of the first, how many
local now = clock(ARGV[2])
local answer = { now, count_of(KEYS[2], 'unread'), 0 }
local streams = redis.call('HGETALL', KEYS[1])
for i = 1, #streams, 2 do
  local stream = ARGV[1] .. streams[i]
  local pending, last = group_of(stream)
  local head = last and head_of(stream, last)
  if pending and pending > 0 and #redis.call('XPENDING', stream, GROUP, 'IDLE', ARGV[3], '-', '+', 1) > 0 then
    answer[3] = 1
  end
  if head then
    answer[#answer + 1] = streams[i]
    answer[#answer + 1] = streams[i + 1]
    answer[#answer + 1] = head
    answer[#answer + 1] = redis.call('XLEN', stream) - pending
  end
end
return answer
