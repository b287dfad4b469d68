-- After a plain read of a stream: count what is left, and see which streams there are.
-- KEYS: lanes, counts
-- ARGV: prefix of the streams' names, now, how many were to be read, bell
-- Returns: now, unread entries left, then pairs of field and model for each stream
local lanes, counts = KEYS[1], KEYS[2]
local streams = redis.call('HGETALL', lanes)
local unread = 0
for i = 1, #streams, 2 do
  local stream = ARGV[1] .. streams[i]
  local pending = group_of(stream)
  if pending then
    unread = unread + math.max(redis.call('XLEN', stream) - pending, 0)
  end
end
local before = count_of(counts, 'unread')
write_also_without_memory(counts)
redis.call('HSET', counts, 'unread', unread)
-- The read should have left nothing: what is there came in between, and no bell was rung for it.
if unread > 0 and before <= tonumber(ARGV[3]) then
  local only = #streams == 2 and ARGV[1] .. streams[1] or ''
  redis.call('SPUBLISH', ARGV[4], unread .. ' ' .. only)
end
local answer = { clock(ARGV[2]), unread }
for i = 1, #streams do
  answer[#answer + 1] = streams[i]
end
return answer
