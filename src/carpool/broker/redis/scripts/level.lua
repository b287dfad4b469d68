-- After a plain read of a stream: count what is left, and see which streams there are.
-- KEYS: lanes, counts
-- ARGV: prefix of the streams' names, now, how many were to be read, bell
-- Returns: now, unread entries left, then for each stream: field, model, id of its first unread entry ('' for none)
local lanes, counts = KEYS[1], KEYS[2]
local streams = redis.call('HGETALL', lanes)
local answer, unread = { clock(ARGV[2]), 0 }, 0
for i = 1, #streams, 2 do
  local stream = ARGV[1] .. streams[i]
  local pending, last = group_of(stream)
  local waiting = pending and math.max(redis.call('XLEN', stream) - pending, 0) or 0
  unread = unread + waiting
  answer[#answer + 1] = streams[i]
  answer[#answer + 1] = streams[i + 1]
  answer[#answer + 1] = waiting > 0 and head_of(stream, last) or ''
end
answer[2] = unread
local before = count_of(counts, 'unread')
write_also_without_memory(counts)
redis.call('HSET', counts, 'unread', unread)
-- The read should have left nothing: what is there came in between, and no bell was rung for it.
if unread > 0 and before <= tonumber(ARGV[3]) then
  local only = #streams == 2 and ARGV[1] .. streams[1] or ''
  redis.call('SPUBLISH', ARGV[4], unread .. ' ' .. only)
end
return answer
