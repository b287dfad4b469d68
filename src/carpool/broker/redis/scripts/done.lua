-- Entries have their outcome: forget them.
-- KEYS: counts
-- ARGV: prefix of the streams' names, then for each stream: field, number of ids, ids
local at, removed, unread = 2, 0, 0
while ARGV[at] do
  local stream, number = ARGV[1] .. ARGV[at], tonumber(ARGV[at + 1])
  local ids = { unpack(ARGV, at + 2, at + 1 + number) }
  local acknowledged = redis.call('XACK', stream, GROUP, unpack(ids))
  local deleted = redis.call('XDEL', stream, unpack(ids))
  removed = removed + deleted
  -- A replica that was promoted may not know that they were taken.
  unread = unread + math.max(deleted - acknowledged, 0)
  at = at + 2 + number
end
if removed > 0 then
  redis.call('HINCRBY', KEYS[1], 'held', -removed)
end
if unread > 0 then
  redis.call('HINCRBY', KEYS[1], 'unread', -unread)
end
return removed
