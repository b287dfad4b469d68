-- Queue requests of one lane, line and gateway: as many as there is room for, in order. With task ids: tasks.
-- ARGV: field, what is said of it, most entries held, most lanes, now, header, owner of the first,
--       id of the dead letter that becomes a task ('' for none), for tasks: most bytes of their inputs, most bytes of
--       inputs and results, ms until they are over, ms that their submitters may have no answer (0: they are accepted
--       now); number of values, values; of each task: id, owner, what its client calls itself, ms until its own deadline
--       ('' if it has none), where its outcome is sent ('' if nowhere)
-- Returns: id of the first entry (the others follow it without a gap), how many were queued, entries held, lanes that
--          count against the bound
local field, text, held_max, lanes_max = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local now, header, owner, letter = clock(ARGV[5]), ARGV[6], ARGV[7], ARGV[8]
local VALUES, FORGOTTEN_MS = 13, 600000
local values = tonumber(ARGV[VALUES])
local wanted = math.min(values, held_max - count_of('held'))
if wanted <= 0 then
  return redis.error_reply('QUEUEFULL no room for another entry')
end

-- Of tasks: the name that a client has for itself is kept with the task, as long as that is.
local function client_of(i)
  return ARGV[VALUES + values + 5 * i - 2]
end

local function url_of(i)
  return ARGV[VALUES + values + 5 * i]
end

local function size_of(i)
  return #ARGV[VALUES + i] + #client_of(i) + #url_of(i) + TASK_BYTES
end

-- The bytes of tasks are bounded too; a shard that has none takes one of any size.
local part, input_bytes = nil, 0
if ARGV[VALUES + values + 1] then
  part = part_of('input_bytes', now, tonumber(ARGV[11]))
  local wanted_bytes = 0
  for i = 1, wanted do
    wanted_bytes = wanted_bytes + size_of(i)
  end
  make_room(wanted_bytes, tonumber(ARGV[10]), wanted, now)
  local inputs, stored = math.max(count_of('input_bytes'), 0), stored_bytes()
  for i = 1, wanted do
    local size = size_of(i)
    local are_inputs_full = inputs > 0 and inputs + size > tonumber(ARGV[9])
    if are_inputs_full or (stored > 0 and stored + size > tonumber(ARGV[10])) then
      if i == 1 then
        return redis.error_reply(are_inputs_full and 'QUEUEFULL no room for its input' or 'STOREFULL no room')
      end
      wanted = i - 1
      break
    end
    inputs, stored, input_bytes = inputs + size, stored + size, input_bytes + size
  end
end

local _, bound = read_about(text)
if bound and redis.call('HEXISTS', OPENERS, field) == 0 and redis.call('HLEN', OPENERS) >= lanes_max then
  -- Whoever has opened less than its share of them is not refused because of what others have opened.
  local own, owners, known = 0, 1, { [owner] = true }
  for _, opener in ipairs(redis.call('HVALS', OPENERS)) do
    own, owners = own + (opener == owner and 1 or 0), owners + (known[opener] and 0 or 1)
    known[opener] = true
  end
  if own >= math.max(1, math.floor(lanes_max / owners)) then
    return redis.error_reply('LANESFULL too many lanes wait')
  end
end

if letter ~= '' and not redis.call('ZSCORE', LETTERS, letter) then
  return redis.error_reply('NOLETTER there is no such dead letter')
end

-- Tasks are numbered in their stream, so that a look can tell how many stand before one.
local number = part and redis.call('HINCRBY', SIZES, 'n' .. field, wanted) - wanted
local stream, first, ids = stream_of(field), nil, {}
local entry_id = ARGV[5] == '' and '*' or ARGV[5] .. '-*'
for i = 1, wanted do
  local id = redis.call('XADD', stream, entry_id, header, ARGV[VALUES + i])
  if not first then
    first = id
    -- Redis's clock goes on while a script runs: the others stay in the first one's millisecond, without a gap.
    entry_id = ms_text_of(id) .. '-*'
  end
  local at = VALUES + values + 5 * i
  local task, its_owner, own_ms = ARGV[at - 4], ARGV[at - 3], ARGV[at - 1]
  if task then
    local size = size_of(i) .. ' ' .. part
    local key, n = task_of(task), number + i
    ids[i] = task
    redis.call('HSET', key, 's', 'P', 'o', its_owner, 't', now, 'f', field, 'e', id, 'b', size, 'n', n)
    if client_of(i) ~= '' then
      redis.call('HSET', task_of(task), 'c', client_of(i))
    end
    if url_of(i) ~= '' then
      redis.call('HSET', task_of(task), 'h', url_of(i))
    end
    if own_ms ~= '' then
      redis.call('HSET', task_of(task), 'd', began_ms(now, ARGV[VALUES + i]) + tonumber(own_ms))
    end
    -- If nobody ends it, and nobody asks: long after its time.
    redis.call('PEXPIRE', task_of(task), 2 * tonumber(ARGV[11]) + FORGOTTEN_MS)
  end
end
if part then
  count_bytes(part, input_bytes)
  if ARGV[12] ~= '0' then
    note_unsure(ids, now, tonumber(ARGV[12]))
  end
end
added(field, text, wanted, ms_of(first), owner)
if letter ~= '' then -- last: what fails before leaves it
  remove_letters({ letter })
end
return { first, wanted, count_of('held'), redis.call('HLEN', OPENERS) }
