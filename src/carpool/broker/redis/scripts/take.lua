-- Give a batcher the best entries that its free slots can use: whole batches, each of one lane.
-- ARGV: consumer, now, lines (`s0`, or `o0=250`: inside its tier it stands so many ms later), closed by '', then for each model: name, new batches, largest batch, number of lanes with
--       a batch that is not full, and for each of these lane and room
-- Returns: what a batcher must know of the shard, then for each stream: field, entries
local consumer, now = ARGV[1], clock(ARGV[2])
local lines, late_ms, names, models, rooms = {}, {}, {}, {}, {}
local at = 3
while ARGV[at] ~= '' do
  local line, late = string.match(ARGV[at], '^([^=]*)=?(%d*)$')
  lines[#lines + 1] = line
  late_ms[line] = tonumber(late)
  at = at + 1
end
at = at + 1
while ARGV[at] do
  local name = ARGV[at]
  names[#names + 1] = name
  local model = { batches = tonumber(ARGV[at + 1]), max = tonumber(ARGV[at + 2]), lanes = {} }
  models[name] = model
  local open = tonumber(ARGV[at + 3])
  for i = 0, open - 1 do
    local lane = ARGV[at + 4 + 2 * i]
    rooms[lane] = tonumber(ARGV[at + 5 + 2 * i])
    model.lanes[#model.lanes + 1] = lane
  end
  at = at + 4 + 2 * open
end

-- The view comes first; what is taken follows it.
local answer = { false }
write_also_without_memory(COUNTS)

local function read(field, number)
  local command = { 'XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', number, 'STREAMS', stream_of(field), '>' }
  local found = redis.pcall(unpack(command))
  local entries = found and not found.err and found[1][2] or {}
  if #entries > 0 then
    answer[#answer + 1] = field
    answer[#answer + 1] = entries
    leased(field)
  end
  look_again(field, names) -- without its group, it has one again
  return #entries
end

-- The stream whose first entry has the smallest place, of those for which there is a slot.
local function best_stream()
  local best, best_place, best_model
  local function consider(field, place, model)
    place = tonumber(place)
    if place and (not best or place < best_place or (place == best_place and field < best)) then
      best, best_place, best_model = field, place, model
    end
  end
  for _, name in ipairs(names) do
    local model, heads = models[name], heads_of(name)
    if model.batches > 0 then
      local first = redis.call('ZRANGE', heads, 0, 0, 'WITHSCORES')
      consider(first[1], first[2], name)
    else
      for _, lane in ipairs(model.lanes) do
        if rooms[lane] > 0 then
          for _, line in ipairs(lines) do
            local field = lane .. ':' .. line
            consider(field, redis.call('ZSCORE', heads, field), name)
          end
        end
      end
    end
  end
  return best, best_model
end

-- How many of each stream are among the first `quota` of their lane. The tier whose first entry has the smallest place
-- goes first, whichever of its lines has it; inside the tier, what exceeds its owner's share stands later.
local function shares_of(streams, quota)
  if #streams == 1 then
    streams[1].number = quota
    return
  end
  for _, stream in ipairs(streams) do
    local _, last = group_of(stream_of(stream.field))
    local offset = about(stream.field)
    local line = string.sub(stream.field, #lane_of(stream.field) + 2)
    stream.late = late_ms[line] or 0
    stream.tier = string.gsub(line, '^o', 's')
    stream.number, stream.places = 0, {}
    for i, entry in ipairs(redis.call('XRANGE', stream_of(stream.field), '(' .. last, '+', 'COUNT', quota)) do
      stream.places[i] = ms_of(entry[1]) + offset
    end
  end
  for _ = 1, quota do
    local best_place, tier
    for _, stream in ipairs(streams) do
      local place = stream.places[stream.number + 1]
      if place and (not best_place or place < best_place) then
        best_place, tier = place, stream.tier
      end
    end
    if not tier then
      return
    end
    local next_stream, next_place
    for _, stream in ipairs(streams) do
      local place = stream.tier == tier and stream.places[stream.number + 1]
      if place and (not next_stream or place + stream.late < next_place) then
        next_stream, next_place = stream, place + stream.late
      end
    end
    next_stream.number = next_stream.number + 1
  end
end

local best, name = best_stream()
while best do
  local model, lane, heads = models[name], lane_of(best), heads_of(name)
  local quota = rooms[lane] or 0
  if quota <= 0 then
    model.batches = model.batches - 1
    quota = model.max
  end
  local streams, has_best = {}, false
  for _, line in ipairs(lines) do
    local field = lane .. ':' .. line
    if redis.call('ZSCORE', heads, field) then
      streams[#streams + 1] = { field = field }
      has_best = has_best or field == best
    end
  end
  if not has_best then -- a line that this batcher does not know
    streams[#streams + 1] = { field = best }
  end
  shares_of(streams, quota)
  local left = quota
  for _, stream in ipairs(streams) do
    if stream.number > 0 then
      left = left - read(stream.field, stream.number)
    end
  end
  if not rooms[lane] then
    model.lanes[#model.lanes + 1] = lane
  end
  rooms[lane] = left < quota and left or 0 -- nothing came: others were told so, and may be next
  best, name = best_stream()
end
answer[1] = view_of(names, now)
return answer
