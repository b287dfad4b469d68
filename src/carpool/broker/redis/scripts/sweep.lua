-- Keep a shard tidy, a part of it at a time: drop streams that are empty and consumers that left, count again, forget old
-- dead letters, end what no batcher ends because none serves its model any more. Everybody else waits for a call, so none
-- does more than a few ms of work.
-- ARGV: where to go on ('0': at the beginning), now, ms after which an idle consumer is gone, most dead letters, most bytes
--       of them, 1 if memory is short, ms that they are kept, ms after which all is counted again, the result of a
--       task whose time is over, with @ for its id, ms that this is kept (without
--       these two, none is ended), the receipt for those that are
-- Returns: where to go on ('': that was the last part), how many letters were dropped before their time, of
--          each task that was ended its id, owner, model, age in ms and field, 1 if more is due than this part did
-- Work is counted in units of about 10 microseconds.
local WORK_MAX, STREAM_WORK, ENDED_WORK, LOOKED_WORK, BYTES_A_UNIT = 256, 12, 6, 1, 2048
local STREAMS_AT_ONCE, DROPPED_AT_ONCE, LETTERS_AT_ONCE, COUNTED_ALWAYS_MAX = 64, 32, 256, 128
local END = 'end'
local now, work, is_more, dropped, late_tasks = clock(ARGV[2]), 0, 0, 0, {}

-- All but the letters is found out again, so what somebody put in its place may go.
local function heal(key, kind)
  local found = redis.pcall('TYPE', key)
  if not found.err and found.ok ~= kind and found.ok ~= 'none' then
    redis.call('DEL', key)
  end
end

-- The same for what is not a whole number.
local function heal_numbers(key)
  local known = redis.call('HGETALL', key)
  for i = 1, #known, 2 do
    if not string.match(known[i + 1], '^%-?%d+$') then
      redis.call('HDEL', key, known[i])
    end
  end
end

local function spend(units)
  work = work + units
end

-- End the entries of a stream whose time has long been over. Any may be: the first ones may live longer, or nobody can
-- tell. Each is looked at once, and all of them again when the time of one of them is over: `sizes` has the last one
-- that was looked at, when the first of these is over, and whether that was the last one old enough.
local SMALL_AT_ONCE, SMALL_BYTES, GRACE_MS, LOOK_AGAIN_MS = 8, 8192, 10000, 600000
local function end_late(field)
  local stream, state = stream_of(field), redis.call('HGET', SIZES, 's' .. field)
  local seen, over_first, is_whole = string.match(state or '', '^(%d+%-%d+) (%d+) ([01])$')
  over_first = tonumber(over_first)
  if not seen or (is_whole == '1' and over_first + GRACE_MS <= now) then
    seen, over_first = '0-0', now + LOOK_AGAIN_MS
  end
  local until_ms, ended, at_once, found = string.format('%.0f', now - GRACE_MS), {}, 1, nil
  repeat
    local wanted = at_once
    found = redis.pcall('XRANGE', stream, '(' .. seen, until_ms, 'COUNT', wanted)
    for _, entry in ipairs(found.err and {} or found) do
      local size = #(entry[2][2] or '')
      seen, at_once = entry[1], size <= SMALL_BYTES and SMALL_AT_ONCE or 1
      spend(LOOKED_WORK + size / BYTES_A_UNIT)
      local over_at, id = life_of(entry)
      if over_at and is_unsure(id, now) then -- its gateway may still refuse it: then it has no outcome
        over_first = math.min(over_first, now)
      elseif over_at and over_at + GRACE_MS <= now then
        local task = task_of(id)
        local facts = redis.pcall('HMGET', task, 's', 'e', 'b', 'o')
        if facts[1] == 'P' and facts[2] == seen then
          local result = string.gsub(ARGV[9], '@', function()
            return id
          end)
          -- A part of the bytes whose time has come counts no more, and goes at the end.
          local gone_at = tonumber(string.match(facts[3] or '', ':(%d+)$'))
          local counted = gone_at and gone_at > now and facts[3]
          keep_result(task, counted, 'F', result, now, tonumber(ARGV[10]))
          local _, _, model = about(field)
          for _, fact in ipairs({ id, facts[4] or '', model or '', now - ms_of(seen), field }) do
            late_tasks[#late_tasks + 1] = fact
          end
        end
        ended[#ended + 1] = seen
        spend(ENDED_WORK)
      elseif over_at then
        over_first = math.min(over_first, over_at)
      end
    end
    is_whole = #found < wanted
  until is_whole or work >= WORK_MAX
  if #ended > 0 then
    redis.call('XACK', stream, GROUP, unpack(ended))
    redis.call('XDEL', stream, unpack(ended))
  end
  if seen ~= '0-0' then
    local text = string.format('%s %.0f %d', seen, over_first, is_whole and 1 or 0)
    if text ~= state then
      redis.call('HSET', SIZES, 's' .. field, text)
    end
  end
  -- Others first; the rest in the next round, which comes soon.
  if not is_whole or over_first + GRACE_MS <= now then
    is_more = 1
  end
end

local function sweep_stream(field)
  local before = carried_bytes
  if ARGV[9] then
    end_late(field)
  end
  look_again(field)
  ended(field, now)
  local consumers = redis.pcall('XINFO', 'CONSUMERS', stream_of(field), GROUP)
  for _, consumer in ipairs(consumers.err and {} or consumers) do
    -- name, <name>, pending, <number>, idle, <ms>; deleting one that has entries pending would lose them
    spend(0.1)
    if consumer[4] > 0 then
      leased(field)
    elseif consumer[6] > tonumber(ARGV[3]) then
      redis.call('XGROUP', 'DELCONSUMER', stream_of(field), GROUP, consumer[2])
    end
  end
  spend(STREAM_WORK + (carried_bytes - before) / BYTES_A_UNIT)
end

-- Some streams. Returns where to go on: with the next part of `lanes`, or in the same one behind a stream. A small hash
-- comes whole, however few are asked for.
local function sweep_streams(cursor)
  local part, position, last = string.match(cursor, '^(%d+) (%d+) (.*)$')
  local found = redis.call('HSCAN', LANES, part or cursor, 'COUNT', STREAMS_AT_ONCE)
  local fields, healed, at = found[2], {}, 1
  if part then
    at = tonumber(position)
    for i = 1, #fields, 2 do -- some before it may be gone
      if fields[i] == last then
        at = i + 2
      end
    end
  end
  while at <= #fields do
    local field = fields[at]
    local _, _, model = read_about(fields[at + 1])
    if not healed[model] then
      healed[model] = true
      heal(heads_of(model), 'zset')
    end
    sweep_stream(field)
    at = at + 2
    if work >= WORK_MAX and at <= #fields then
      return string.format('%s %d %s', part or cursor, at, field)
    end
  end
  return found[1] == '0' and END or found[1]
end

-- What all streams have together, at one moment, by what was just found out of each: entries, and the lanes that count.
-- An older Carpool, or somebody else, may have changed that.
local function count_streams()
  local sizes, lanes = facts_of(redis.call('HGETALL', SIZES)), redis.call('HGETALL', LANES)
  local held, unread, is_waiting, is_known, by_line = 0, 0, {}, {}, {}
  for _, name in ipairs(redis.call('HKEYS', COUNTS)) do
    if string.sub(name, 1, 7) == 'unread:' then
      by_line[name] = 0
    end
  end
  for i = 1, #lanes, 2 do
    local field = lanes[i]
    local _, bound = read_about(lanes[i + 1])
    local left = tonumber(sizes['u' .. field] or '0') or 0
    is_known[field] = true
    held, unread = held + (tonumber(sizes['h' .. field] or '0') or 0), unread + left
    by_line[unread_of(field)] = (by_line[unread_of(field)] or 0) + left
    if bound and left > 0 then
      is_waiting[field] = true
    end
  end
  redis.call('HSET', COUNTS, 'held', held, 'unread', unread)
  for name, left in pairs(by_line) do
    if left > 0 then
      redis.call('HSET', COUNTS, name, left)
    else
      redis.call('HDEL', COUNTS, name)
    end
  end
  for name in pairs(sizes) do
    if name ~= 'looks' and not is_known[string.sub(name, 2)] then
      redis.call('HDEL', SIZES, name)
    end
  end
  for _, field in ipairs(redis.call('HKEYS', OPENERS)) do
    if not is_waiting[field] then
      redis.call('HDEL', OPENERS, field)
    end
  end
  for field in pairs(is_waiting) do
    begins_to_wait(field, true, '')
  end
end

-- Whether something that takes long is due, which is written down.
local function is_due(name)
  if math.abs(now - count_of(name)) < tonumber(ARGV[8]) then
    return false
  end
  redis.call('HSET', COUNTS, name, now)
  return true
end

local function sweep_counts()
  if redis.call('HLEN', LANES) <= COUNTED_ALWAYS_MAX or is_due('streams_counted') then
    count_streams()
  end
  local bytes = { input_bytes = 0, result_bytes = 0, read_bytes = 0 }
  local known = redis.call('HGETALL', COUNTS)
  for i = 1, #known, 2 do
    local total, gone_at = string.match(known[i], '^(%l+_bytes):(%d+)$')
    if total and tonumber(gone_at) <= now then
      redis.call('HDEL', COUNTS, known[i])
    elseif bytes[total] then
      bytes[total] = bytes[total] + math.max(tonumber(known[i + 1]), 0)
    end
  end
  for total, number in pairs(bytes) do
    redis.call('HSET', COUNTS, total, number)
  end
end

local function sweep_letters()
  local too_old = (now - tonumber(ARGV[7])) * 16
  local old = redis.call('ZRANGEBYSCORE', LETTERS, '-inf', too_old, 'LIMIT', 0, LETTERS_AT_ONCE)
  remove_letters(old)
  if #old == LETTERS_AT_ONCE then
    is_more = 1
  end
  if is_due('letters_counted') then
    local letter_bytes = 0
    for _, id in ipairs(redis.call('ZRANGE', LETTERS, 0, -1)) do
      letter_bytes = letter_bytes + redis.call('HSTRLEN', LETTER_BODIES, id)
    end
    redis.call('HSET', COUNTS, 'letter_bytes', letter_bytes)
  end
  local letter_bytes_max = tonumber(ARGV[5])
  if ARGV[6] == '1' then -- half of them now, half of the rest at the next sweep
    letter_bytes_max = math.min(letter_bytes_max, math.floor(count_of('letter_bytes') / 2))
  end
  dropped = evict(tonumber(ARGV[4]), letter_bytes_max)
end

if ARGV[1] == '0' then
  for _, key in ipairs({ COUNTS, LANES, SIZES, OPENERS, LETTER_BODIES }) do
    heal(key, 'hash')
  end
  for _, key in ipairs({ LEASED, IDLE, LETTERS, HOOKS, UNSURE, READ }) do
    heal(key, 'zset')
  end
  heal_numbers(COUNTS)
end
write_also_without_memory(COUNTS)
local next_part = ''
if ARGV[1] == END then
  sweep_counts()
  sweep_letters()
else
  next_part = sweep_streams(ARGV[1])
end
drop_idle(DROPPED_AT_ONCE, now)
note_ends(ARGV[11], late_tasks)
return { next_part, dropped, late_tasks, is_more }
