-- A task's state. While it has no result, a gateway may ask to be told when it has. One whose time is over, and that no
-- batcher ends, because none serves its model any more, has failed.
-- ARGV: id of the task, the gateway's name, without spaces ('': it need not be told), now, the result of one whose time is
--       over, ms that this is kept
-- Returns: status, owner, ms, result, each nil if there is none; 1 if its time was over
local NAMES_BYTES_MAX = 4096
local task, gateway, now = task_of(ARGV[1]), ARGV[2], clock(ARGV[3])
local state = redis.call('HMGET', task, 's', 'o', 't', 'r', 'b', 'f', 'e', 'd')
local was_over = 0
if state[1] == 'P' then
  -- It has its own deadline, or the part that its bytes count in ends soon after its time.
  local over_at = tonumber(state[8] or string.match(state[5] or '', ':(%d+)$'))
  if over_at and over_at < now then
    write_also_without_memory(COUNTS)
    keep_result(task, state[5], 'F', ARGV[4], now, tonumber(ARGV[5]))
    forget_entries(state[6], { state[7] }, now)
    state[1], state[3], state[4], was_over = 'F', now, ARGV[4], 1
  elseif gateway ~= '' then
    local names = redis.call('HGET', task, 'w') or ''
    if not string.find(' ' .. names .. ' ', ' ' .. gateway .. ' ', 1, true) then
      -- Gateways look again by themselves: it does no harm if some are not told, or if there is no memory for this.
      local others = (names == '' or #names > NAMES_BYTES_MAX) and '' or names .. ' '
      redis.pcall('HSET', task, 'w', others .. gateway)
    end
  end
end
return { state[1], state[2], state[3], state[4], was_over }
