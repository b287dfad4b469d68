-- Remove a task in any state, and its entry if nobody took it yet. Whoever took it finds no task for its result.
-- KEYS: task, counts
-- ARGV: prefix of the streams' names
-- Returns: names of the gateways where somebody waits for it, 1 if it had no result; nil if there is no such task
local state = redis.call('HMGET', KEYS[1], 's', 'f', 'e', 'w', 'b')
if not state[1] then
  return false
end
if state[1] == 'P' then
  local stream, id = ARGV[1] .. state[2], state[3]
  local pending = redis.pcall('XPENDING', stream, GROUP, id, id, 1)
  if not pending.err and not pending[1] and redis.call('XDEL', stream, id) == 1 then
    redis.call('HINCRBY', KEYS[2], 'held', -1)
    redis.call('HINCRBY', KEYS[2], 'unread', -1)
  end
end
redis.call('DEL', KEYS[1])
uncount_bytes(KEYS[2], state[5])
return { state[4] or '', state[1] == 'P' and 1 or 0 }
