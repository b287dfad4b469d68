-- Give a batcher the best entries that its free slots can use: whole batches, each of one lane.
-- KEYS: lanes, counts
-- ARGV: prefix of the streams' names, consumer, now, ms (0), then pairs of line and what it adds to an entry's time
--       for its place in the order, closed by ''; then for each model: name, new batches, largest batch,
--       number of lanes with a batch that is not full, and for each of these lane and room.
--       With ms > 0, entries whose lease is so old are claimed, and nothing new is taken.
-- Returns: now, unread entries left, then for each stream: field, entries; for claimed ones also their delivery counts
local IDLE_STREAMS_KEPT = 64
local lanes, counts, prefix, consumer = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local now, lease_ms = clock(ARGV[3]), tonumber(ARGV[4])
local offsets, models, rooms = {}, {}, {}
local at = 5
while ARGV[at] ~= '' do
  offsets[ARGV[at]] = tonumber(ARGV[at + 1])
  at = at + 2
end
at = at + 1
while ARGV[at] do
  local model = { batches = tonumber(ARGV[at + 1]), max = tonumber(ARGV[at + 2]) }
  models[ARGV[at]] = model
  local open = tonumber(ARGV[at + 3])
  for i = 0, open - 1 do
    rooms[ARGV[at + 4 + 2 * i]] = tonumber(ARGV[at + 5 + 2 * i])
  end
  at = at + 4 + 2 * open
end

local answer, taken = { now, 0 }, 0

-- How many of a lane may come now; a new batch is opened only if `spend` says so.
local function quota_of(lane, model, spend)
  local room = rooms[lane] or 0
  if room > 0 then
    return room
  end
  if model.batches <= 0 then
    return 0
  end
  if spend then
    model.batches = model.batches - 1
    rooms[lane] = model.max
  end
  return model.max
end

local function used(lane, number)
  rooms[lane] = (rooms[lane] or 0) - number
  taken = taken + number
end

local function read(field, number)
  local found = redis.pcall('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', number, 'STREAMS', prefix .. field, '>')
  if found and found.err then
    return 0 -- a stream without its group: the next sweep mends that
  end
  local entries = found and found[1][2] or {}
  if #entries > 0 then
    answer[#answer + 1] = field
    answer[#answer + 1] = entries
  end
  return #entries
end

local streams = redis.call('HGETALL', lanes)

if lease_ms > 0 then
  -- The streams with leases, those first whose oldest lease has the best place.
  local leased = {}
  for i = 1, #streams, 2 do
    local field, model = streams[i], models[streams[i + 1]]
    local pending = model and group_of(prefix .. field)
    if pending and pending > 0 then
      local lane, line = string.match(field, '^(%x+):(.*)$')
      local oldest = redis.call('XPENDING', prefix .. field, GROUP)[2]
      leased[#leased + 1] = { field = field, lane = lane, model = model, place = ms_of(oldest) + (offsets[line] or 0) }
    end
  end
  table.sort(leased, function(one, other)
    return one.place < other.place or (one.place == other.place and one.field < other.field)
  end)
  for _, facts in ipairs(leased) do
    local stream, from = prefix .. facts.field, '0-0'
    local quota = quota_of(facts.lane, facts.model, false)
    while from and quota > 0 do
      -- It looks at ten times as many leases as it may claim, and says where to go on ('0-0': nowhere).
      local found = redis.call('XAUTOCLAIM', stream, GROUP, consumer, lease_ms, from, 'COUNT', quota)
      local entries = found[2]
      if #entries > 0 then
        quota_of(facts.lane, facts.model, true)
        used(facts.lane, #entries)
        local deliveries = {}
        for j, entry in ipairs(entries) do
          deliveries[j] = redis.call('XPENDING', stream, GROUP, entry[1], entry[1], 1)[1][4]
        end
        answer[#answer + 1] = facts.field
        answer[#answer + 1] = entries
        answer[#answer + 1] = deliveries
      end
      from = found[1] ~= '0-0' and found[1]
      quota = quota_of(facts.lane, facts.model, false)
    end
  end
  answer[2] = count_of(counts, 'unread')
  return answer
end

if #streams == 2 then
  -- One lane and one line, the usual case: there is no order to find out.
  local model, lane = models[streams[2]], string.match(streams[1], '^(%x+)')
  local number = 0
  if model then
    number = (rooms[lane] or 0) + model.batches * model.max
  end
  if number > 0 then
    taken = read(streams[1], number)
  end
else
  -- The lanes with unread entries, and of each its lines.
  local found, idle = {}, 0
  for i = 1, #streams, 2 do
    local field, model = streams[i], models[streams[i + 1]]
    if model then
      local lane, line = string.match(field, '^(%x+):(.*)$')
      local _, last = group_of(prefix .. field)
      local head = last and head_of(prefix .. field, last)
      if head then
        found[lane] = found[lane] or { model = model, lines = {} }
        local place = ms_of(head) + (offsets[line] or 0)
        table.insert(found[lane].lines, { field = field, last = last, offset = offsets[line] or 0, place = place })
      else
        -- Clients that never repeat their parameters leave streams faster than the sweeps come.
        idle = idle + 1
        if idle > IDLE_STREAMS_KEPT then
          drop_if_idle(lanes, field, prefix .. field, now)
        end
      end
    end
  end
  while true do
    local best, best_place
    for lane, facts in pairs(found) do
      if quota_of(lane, facts.model, false) > 0 then
        for _, line in ipairs(facts.lines) do
          if not best or line.place < best_place or (line.place == best_place and lane < best) then
            best, best_place = lane, line.place
          end
        end
      end
    end
    if not best then
      break
    end
    local facts = found[best]
    local quota = quota_of(best, facts.model, true)
    local lines = facts.lines
    table.sort(lines, function(one, other)
      return one.field < other.field -- where places are equal: synchronous before tasks, higher tiers first
    end)
    if #lines == 1 then
      lines[1].number = quota
    else
      -- Merge the lines by place: how many of each are among the first `quota`?
      for _, line in ipairs(lines) do
        line.number, line.ids = 0, {}
        for j, entry in ipairs(redis.call('XRANGE', prefix .. line.field, '(' .. line.last, '+', 'COUNT', quota)) do
          line.ids[j] = ms_of(entry[1]) + line.offset
        end
      end
      for _ = 1, quota do
        local next_line
        for _, line in ipairs(lines) do
          local place = line.ids[line.number + 1]
          if place and (not next_line or place < next_line.ids[next_line.number + 1]) then
            next_line = line
          end
        end
        if not next_line then
          break
        end
        next_line.number = next_line.number + 1
      end
    end
    local left = {}
    for _, line in ipairs(lines) do
      if line.number > 0 then
        used(best, read(line.field, line.number))
        local _, last = group_of(prefix .. line.field)
        line.last = last
        local head = head_of(prefix .. line.field, last)
        if head then
          line.place = ms_of(head) + line.offset
          left[#left + 1] = line
        end
      else
        left[#left + 1] = line
      end
    end
    facts.lines = left
    if #left == 0 then
      found[best] = nil
    end
  end
end
answer[2] = taken > 0 and redis.call('HINCRBY', counts, 'unread', -taken) or count_of(counts, 'unread')
return answer
