-- Give a batcher entries whose leases are over: of a model with a free slot, as many as that can use.
-- ARGV: consumer, now, ms after which a lease is over, then for each model: name, new batches, largest batch, number of
--       lanes with a batch that is not full, and for each of these lane and room
-- Returns: what a batcher must know of the shard, then for each stream: field, entries, their delivery counts
local STREAMS_MAX = 256
local consumer, now, lease_ms = ARGV[1], clock(ARGV[2]), ARGV[3]
-- The view comes first; what is claimed follows it.
local names, models, rooms, answer = {}, {}, {}, { false }
local at = 4
while ARGV[at] do
  names[#names + 1] = ARGV[at]
  models[ARGV[at]] = { batches = tonumber(ARGV[at + 1]), max = tonumber(ARGV[at + 2]) }
  local open = tonumber(ARGV[at + 3])
  for i = 0, open - 1 do
    rooms[ARGV[at + 4 + 2 * i]] = tonumber(ARGV[at + 5 + 2 * i])
  end
  at = at + 4 + 2 * open
end

write_also_without_memory(COUNTS)
-- The streams with leases, those first whose oldest lease has the best place.
local found = {}
for _, field in ipairs(redis.call('ZRANGE', LEASED, 0, STREAMS_MAX - 1)) do
  local offset, _, name = about(field)
  local oldest = looked_at(field)
  if oldest and models[name] then
    found[#found + 1] = { field = field, model = models[name], place = ms_of(oldest) + offset }
  end
end
table.sort(found, function(one, other)
  return one.place < other.place or (one.place == other.place and one.field < other.field)
end)
for _, facts in ipairs(found) do
  local stream, lane, model, from = stream_of(facts.field), lane_of(facts.field), facts.model, '0-0'
  while from do
    local quota = rooms[lane] or 0
    if quota <= 0 then
      quota = model.batches > 0 and model.max or 0
    end
    if quota <= 0 then
      break
    end
    -- It looks at ten times as many leases as it may claim, and says where to go on ('0-0': nowhere).
    local claimed = redis.call('XAUTOCLAIM', stream, GROUP, consumer, lease_ms, from, 'COUNT', quota)
    local entries = claimed[2]
    if #entries > 0 then
      if (rooms[lane] or 0) <= 0 then
        model.batches = model.batches - 1
        rooms[lane] = model.max
      end
      rooms[lane] = rooms[lane] - #entries
      local deliveries = {}
      for i, entry in ipairs(entries) do
        deliveries[i] = redis.call('XPENDING', stream, GROUP, entry[1], entry[1], 1)[1][4]
      end
      answer[#answer + 1] = facts.field
      answer[#answer + 1] = entries
      answer[#answer + 1] = deliveries
    end
    from = claimed[1] ~= '0-0' and claimed[1]
  end
end
answer[1] = view_of(names, now)
return answer
