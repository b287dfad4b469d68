-- What waits in a shard.
-- KEYS: lanes, counts
-- ARGV: prefix of the streams' names, now
-- Returns: now, unread entries, then for each stream with unread entries: field, model, id of the first, how many
local now = clock(ARGV[2])
local answer = { now, count_of(KEYS[2], 'unread') }
local streams = redis.call('HGETALL', KEYS[1])
for i = 1, #streams, 2 do
  local stream = ARGV[1] .. streams[i]
  local pending, last = group_of(stream)
  local head = last and head_of(stream, last)
  if head then
    answer[#answer + 1] = streams[i]
    answer[#answer + 1] = streams[i + 1]
    answer[#answer + 1] = head
    answer[#answer + 1] = redis.call('XLEN', stream) - pending
  end
end
return answer
