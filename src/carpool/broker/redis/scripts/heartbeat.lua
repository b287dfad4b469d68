-- Say that one process lives, and learn who else does. Stamps are this server's time: no other clock is compared.
-- KEYS: gateways, batchers
-- ARGV: name, what it says of itself as a gateway, as a batcher ('' where it is none), now,
--       ms after which one that fell silent is forgotten, longest value that is handed on
-- Returns: now, gateways, batchers: each as names and values, a value being its stamp in ms, a space and what was said
local name, now = ARGV[1], clock(ARGV[4])
local kept_ms, longest = tonumber(ARGV[5]), tonumber(ARGV[6])
local answer = { now }
for i = 1, 2 do
  if ARGV[1 + i] ~= '' then
    redis.call('HSET', KEYS[i], name, string.format('%d ', now) .. ARGV[1 + i])
  end
  local members, known = {}, redis.call('HGETALL', KEYS[i])
  for j = 1, #known, 2 do
    local stamp = tonumber(string.match(known[j + 1], '^(%d+) '))
    -- One from the future is as silent as an old one: the clock was set back, and nobody stamped it since.
    if not stamp or math.abs(now - stamp) > kept_ms then
      redis.call('HDEL', KEYS[i], known[j])
    elseif #known[j + 1] <= longest then
      members[#members + 1] = known[j]
      members[#members + 1] = known[j + 1]
    end
  end
  answer[1 + i] = members
end
return answer
