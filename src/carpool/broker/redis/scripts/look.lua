-- A task's state. While it has no result, a gateway may ask to be told when it has.
-- ARGV: id of the task, the gateway's name, without spaces
-- Returns: status, owner, ms, result; each nil if there is none
local NAMES_BYTES_MAX = 4096
local task, gateway = task_of(ARGV[1]), ARGV[2]
local state = redis.call('HMGET', task, 's', 'o', 't', 'r')
if state[1] == 'P' then
  local names = redis.call('HGET', task, 'w') or ''
  if not string.find(' ' .. names .. ' ', ' ' .. gateway .. ' ', 1, true) then
    -- Gateways look again by themselves: it does no harm if some are not told, or if there is no memory for this.
    local others = (names == '' or #names > NAMES_BYTES_MAX) and '' or names .. ' '
    redis.pcall('HSET', task, 'w', others .. gateway)
  end
end
return state
