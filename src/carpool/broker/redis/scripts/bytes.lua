-- Prepended to the scripts that change how many bytes of tasks a shard keeps.
-- They are counted twice: in a total (`input_bytes`: tasks without a result; `result_bytes`; `read_bytes`: results that
-- somebody has read), and in a part of it that
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

local function stored_bytes()
  local counts = redis.call('HMGET', COUNTS, 'input_bytes', 'result_bytes', 'read_bytes')
  local stored = 0
  for i = 1, 3 do
    stored = stored + math.max(tonumber(counts[i] or '0') or 0, 0)
  end
  return stored
end

-- Forget a task. The batcher that finished it may not know yet that it did, and ask again: `ended` tells it.
local READ, FINISHER_KEPT_MS = PREFIX .. 'was-read', 30000
local function drop_task(task, ended, counted)
  redis.call('DEL', task)
  redis.call('ZREM', READ, string.sub(task, #task_of('') + 1))
  if string.find(ended or '', ' ', 1, true) then
    redis.call('HSET', task, 'e', ended)
    redis.call('PEXPIRE', task, FINISHER_KEPT_MS)
  end
  uncount_bytes(counted)
end

-- Results that were read, by when they are gone. Where there is hardly room for new tasks these go first: from this share
-- of the bound on, and some more of them than tasks come, so that a script stays short.
local NEARLY_FULL, DROPPED_A_TASK, DROPPED_MIN = 0.85, 2, 32
local function make_room(bytes, bytes_max, tasks, now)
  local too_much = stored_bytes() + bytes - NEARLY_FULL * bytes_max
  local left = DROPPED_A_TASK * tasks + DROPPED_MIN
  while too_much > 0 and left > 0 do
    local id = redis.call('ZPOPMIN', READ)[1]
    if not id then
      return
    end
    local task = task_of(id)
    local state = redis.call('HMGET', task, 'b', 'e', 't')
    local size = string.match(state[1] or '', '^(%d+) read_bytes:')
    if size then
      local is_asked = now - tonumber(state[3] or '0') < FINISHER_KEPT_MS
      drop_task(task, is_asked and state[2], state[1])
      too_much = too_much - size
    end
    left = left - 1
  end
end

-- Tasks whose submitters have no answer yet, by when they count as accepted all the same: the gateway that submitted them
-- may have died. Until then they may be worked on, but have no outcome: the gateway may still withdraw them, and then
-- nothing is left of them. A time that is far away is of another server's clock.
local UNSURE, UNSURE_MS_MAX = PREFIX .. 'unsure', 120000
local function note_unsure(ids, now, unsure_ms)
  redis.call('ZREMRANGEBYSCORE', UNSURE, '-inf', now)
  local until_ms, members = string.format('%.0f', now + unsure_ms), {}
  for _, id in ipairs(ids) do
    members[#members + 1] = until_ms
    members[#members + 1] = id
  end
  redis.call('ZADD', UNSURE, unpack(members))
end

local function is_unsure(id, now)
  local until_ms = tonumber(redis.call('ZSCORE', UNSURE, id) or '0')
  return now < until_ms and until_ms <= now + UNSURE_MS_MAX
end

-- Webhooks: outcomes that wait to be sent, by task. Of each host those that wait, by when they are due; and the hosts by
-- when the first of theirs is. They are counted in `hooks` and `hook_bytes`. One that no gateway sends, because none is
-- to any more, is forgotten in the end.
local HOOKS, HOOK_BYTES, HOOK_KEPT_MS = PREFIX .. 'hooks', 512, 8 * 86400000
local function hook_of(id)
  return PREFIX .. 'hook:' .. id
end

local function hooks_to(host)
  return PREFIX .. 'hooks:' .. host
end

local function host_of(url)
  return string.lower(string.match(url, '^%a+://([^/?]+)') or '')
end

local function note_first(host)
  local first = redis.call('ZRANGE', hooks_to(host), 0, 0, 'WITHSCORES')
  if first[1] then
    redis.call('ZADD', HOOKS, first[2], host)
  else
    redis.call('ZREM', HOOKS, host)
  end
end

-- Let a webhook be due. Returns 1 if it is new.
local function let_be_due(id, host, due)
  local is_new = redis.call('ZADD', hooks_to(host), string.format('%.0f', due), id)
  note_first(host)
  return is_new
end

-- A copy: the result may be read and deleted long before its webhook is delivered.
local function keep_hook(id, url, status, result, ended, now)
  local hook = hook_of(id)
  redis.call('HSET', hook, 'u', url, 's', status, 'r', result, 't', ended, 'a', 0)
  redis.call('PEXPIRE', hook, HOOK_KEPT_MS)
  if let_be_due(id, host_of(url), now) == 1 then
    redis.call('HINCRBY', COUNTS, 'hooks', 1)
    redis.call('HINCRBY', COUNTS, 'hook_bytes', #result + HOOK_BYTES)
  end
end

local function forget_hook(id, host)
  local size = redis.call('HSTRLEN', hook_of(id), 'r')
  redis.call('DEL', hook_of(id))
  if redis.call('ZREM', hooks_to(host), id) == 1 then
    redis.call('HINCRBY', COUNTS, 'hooks', -1)
    redis.call('HINCRBY', COUNTS, 'hook_bytes', -size - HOOK_BYTES)
    note_first(host)
  end
end

-- Give a task its result in place of its input. `ended`: when it came, if that was not now.
local function keep_result(task, counted, status, result, now, kept_ms, ended)
  local part = part_of('result_bytes', now, kept_ms)
  local url = redis.call('HGET', task, 'h')
  if url then
    keep_hook(string.sub(task, #task_of('') + 1), url, status, result, ended or now, now)
  end
  -- Its client's name for itself stays with it, and so does the URL.
  local size = #result + redis.call('HSTRLEN', task, 'c') + #(url or '') + TASK_BYTES
  uncount_bytes(counted)
  count_bytes(part, size)
  redis.call('HSET', task, 's', status, 'r', result, 't', ended or now, 'b', size .. ' ' .. part)
  redis.call('HDEL', task, 'f', 'w', 'd', 'n') -- the id of its entry tells when it was submitted
  redis.call('PEXPIRE', task, kept_ms)
end

-- Tasks have their outcome from a step of a process that counts them. If its reply is lost, that process finds them under
-- the receipt that it gave (ended_tasks.py). `facts`: of each its id, owner, model, age in ms and field.
local ENDS_KEPT_MS = 3600000
local function note_ends(receipt, facts)
  local process, number = string.match(receipt or '', '^(%S+) (%d+)$')
  if process and #facts > 0 then
    redis.call('HSET', PREFIX .. 'ends:' .. process, number, cmsgpack.pack(facts))
    redis.call('PEXPIRE', PREFIX .. 'ends:' .. process, ENDS_KEPT_MS)
  end
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
