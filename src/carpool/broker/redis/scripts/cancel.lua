-- Delete entries that nobody took yet.
-- KEYS: counts
-- ARGV: prefix of the streams' names, then pairs of field and id
-- Returns: for each of them 1 if it was deleted, 0 if it was taken or has its outcome
local answer, deleted = {}, 0
for i = 2, #ARGV, 2 do
  local stream = ARGV[1] .. ARGV[i]
  local state = redis.pcall('XPENDING', stream, GROUP, ARGV[i + 1], ARGV[i + 1], 1)
  local removed = 0
  if state.err or not state[1] then -- no group, no lease
    removed = redis.call('XDEL', stream, ARGV[i + 1])
  end
  answer[#answer + 1] = removed
  deleted = deleted + removed
end
if deleted > 0 then
  redis.call('HINCRBY', KEYS[1], 'held', -deleted)
  redis.call('HINCRBY', KEYS[1], 'unread', -deleted)
end
return answer
