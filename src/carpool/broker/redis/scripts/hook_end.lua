-- A webhook was delivered or given up, or is to be sent again.
-- ARGV: id of the task, URL, ms until it is due again ('': it is forgotten), why the attempt failed ('': there was none),
--       now
-- Returns: 1
local id, host = ARGV[1], host_of(ARGV[2])
local hook = hook_of(id)
write_also_without_memory(COUNTS)
if ARGV[3] == '' or redis.call('EXISTS', hook) == 0 then
  forget_hook(id, host)
else
  redis.call('HDEL', hook, 'l')
  let_be_due(id, host, clock(ARGV[5]) + tonumber(ARGV[3]))
  if ARGV[4] ~= '' then
    redis.call('HINCRBY', hook, 'a', 1)
    redis.call('HSET', hook, 'f', ARGV[4])
  end
end
return 1
