-- Keeps how many processes and GPUs are wanted, if nobody has decided since the caller heard what was kept.
-- KEYS: the decisions. ARGV: what the caller heard ('': none), its own ('': it only asks), ms to keep them
-- Returns: what is kept now; '' if that is nothing
local kept = redis.call('GET', KEYS[1]) or ''
if kept == ARGV[1] and ARGV[2] ~= '' then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  return ARGV[2]
end
return kept
