-- Prepended to the scripts that change how many bytes of tasks a shard keeps.
-- They are counted twice: in a total (`input_bytes`: tasks without a result; `result_bytes`), and in a part of it that
-- is gone by a certain time whatever happens (`<total>:<ms>`): the end of a task's time, or of its result's. The sweep
-- drops parts whose time has come and adds up the others, so a wrong count mends itself. A task has its size and its part
-- in one field: another one would cost 80 bytes.
local PARTS = 32
local PART_MS_MIN = 1000
-- What Redis needs for a task beside its payload.
local TASK_BYTES = 256

local function part_of(total, now, kept_ms)
  local width = math.max(math.ceil(kept_ms / PARTS), PART_MS_MIN)
  return string.format('%s:%.0f', total, math.ceil((now + kept_ms) / width) * width)
end

local function count_bytes(part, bytes)
  redis.call('HINCRBY', COUNTS, part, bytes)
  redis.call('HINCRBY', COUNTS, string.match(part, '^[^:]+'), bytes)
end

-- `field` is what the task has; nothing if an older Carpool wrote it, or somebody else did: that counts nowhere.
local function uncount_bytes(field)
  local size, part = string.match(field or '', '^(%d+) (%l+_bytes:%d+)$')
  if size then
    count_bytes(part, -size)
  end
end

-- Give a task its result in place of its input.
local function keep_result(task, counted, status, result, now, kept_ms)
  local part = part_of('result_bytes', now, kept_ms)
  local size = #result + redis.call('HSTRLEN', task, 'c') + TASK_BYTES -- its client's name for itself stays with it
  uncount_bytes(counted)
  count_bytes(part, size)
  redis.call('HSET', task, 's', status, 'r', result, 't', now, 'b', size .. ' ' .. part)
  redis.call('HDEL', task, 'f', 'w', 'd', 'n') -- the id of its entry tells when it was submitted
  redis.call('PEXPIRE', task, kept_ms)
end

-- The numbers of tasks that were removed from a stream before somebody took them: whoever stands before one of them must
-- not be taken to have moved up. Of many, the lowest are forgotten: few stand before those.
local GONE_MAX = 1000
local function gone_of(field)
  return PREFIX .. 'gone:' .. field
end

local function leaves_line(field, number)
  if number then
    redis.call('ZADD', gone_of(field), number, number)
    redis.call('ZREMRANGEBYRANK', gone_of(field), 0, -GONE_MAX - 1)
  end
end
