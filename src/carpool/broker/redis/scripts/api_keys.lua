-- Keeps or forgets an API key, and lets every gateway see that something changed.
-- KEYS: the keys, their version. ARGV: name, a version that no other has, what is kept of the key ('': forget it)
-- Returns: 1, or 0 if there is one of that name already, or none to forget
local name, version, body = ARGV[1], ARGV[2], ARGV[3]
local changed
if body == '' then
  changed = redis.call('HDEL', KEYS[1], name)
else
  changed = redis.call('HSETNX', KEYS[1], name, body)
end
if changed == 1 then
  redis.call('HSET', KEYS[2], 'now', version)
end
return changed
