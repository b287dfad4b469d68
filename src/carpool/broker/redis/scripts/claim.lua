-- Give a batcher entries whose leases are over: of a model with a free slot, as many as that can use. What may be the
-- reason that batchers die comes in small company, if it may come at all: see suspects.py.
-- ARGV: consumer, now, ms after which a lease is over, most deliveries, most of a company that is not small, then for
--       each model: name, new batches, largest batch, suspects: 0 none, 1 only those with company, 2 any; what
--       is left to others: 0 nothing, 1 what it gave back itself, 2 also what may not go back again; number of batches that are begun, of each: lane and delivery count, room
-- Returns: what a batcher must know of the shard, the models of which more could be claimed with more room, those of
--          which suspects are left, then for each stream: field, entries, their delivery counts
local STREAMS_MAX, LEASES_AT_ONCE, LEASES_MAX, GIVEN_UP_MAX = 256, 128, 4096, 16
local consumer, now, lease_ms = ARGV[1], clock(ARGV[2]), ARGV[3]
local deliveries_max, company_max = tonumber(ARGV[4]), tonumber(ARGV[5])
-- The view and what is left come first; what is claimed follows them.
local names, models, rooms, answer = {}, {}, {}, { false, {}, {} }
local at = 6
while ARGV[at] do
  names[#names + 1] = ARGV[at]
  models[ARGV[at]] =
    { batches = tonumber(ARGV[at + 1]), max = tonumber(ARGV[at + 2]), suspects = tonumber(ARGV[at + 3]) }
  models[ARGV[at]].left = tonumber(ARGV[at + 4])
  local begun = tonumber(ARGV[at + 5])
  at = at + 6
  for _ = 1, begun do
    rooms[ARGV[at]] = tonumber(ARGV[at + 1])
    at = at + 2
  end
end
local leases_seen, given_up, companies, alone = 0, 0, 0, false

-- With how many of its like an entry may come that is delivered so often by now; 0 if it only needs an answer.
local function company_of(delivery)
  if delivery > deliveries_max then
    return 0
  end
  return delivery < 2 and company_max or math.min(4 ^ math.max(deliveries_max - 1 - delivery, 0), company_max)
end

-- Whether an entry that was given back is left to other batchers, where one is well, for as long as a lease: this one
-- gave it back itself; or no endpoint of this one is known to work, and it was sent to try one before, or may not go back.
-- Where this one would have blamed its input, another one's word is waited for, however long that takes.
local function is_for_others(lease, model)
  if model.left == 0 or lease[3] < GIVEN_BACK_MS then
    return false
  end
  if lease[3] >= GIVEN_BACK_MS + tonumber(lease_ms) then
    return lease[2] == consumer and was_blamed(lease)
  end
  return lease[2] == consumer or (model.left == 2 and (was_probe(lease) or was_given_back_twice(lease)))
end

-- Whether it may come.
local function has_place(facts, delivery, company, is_alone)
  local model = facts.model
  if company == 0 then
    given_up = given_up + 1
    return given_up <= GIVEN_UP_MAX
  end
  local key = lane_of(facts.field) .. ' ' .. delivery
  if is_alone then -- it has a batch to itself
    local is_free = model.batches > 0
    model.batches = model.batches - (is_free and 1 or 0)
    return is_free
  end
  if company < company_max then
    -- Those of one model are together, or wait; whoever has to be alone is so in the whole batcher.
    local is_mine = model.company == key
    if alone or model.suspects == 0 or (model.company and not is_mine) then
      return false
    end
    if company == 1 and (model.suspects == 1 or companies > 0) then
      return false
    end
    if not is_mine and model.batches > 0 then
      model.company, model.batches, rooms[key] = key, model.batches - 1, math.min(company, model.max)
      companies, alone = companies + 1, company == 1
    end
  elseif (rooms[key] or 0) == 0 and model.batches > 0 then
    model.batches, rooms[key] = model.batches - 1, model.max
  end
  local room = rooms[key] or 0
  rooms[key] = math.max(room - 1, 0)
  return room > 0
end

local function claim(facts)
  local stream, from, ids, deliveries = stream_of(facts.field), '-', {}, {}
  repeat
    local leases = redis.pcall('XPENDING', stream, GROUP, 'IDLE', lease_ms, from, '+', LEASES_AT_ONCE)
    for _, lease in ipairs(leases.err and {} or leases) do -- id, consumer, idle ms, deliveries
      from = '(' .. lease[1]
      local delivery = deliveries_of(lease) + 1
      local company = company_of(delivery)
      if not is_for_others(lease, facts.model) then
        if has_place(facts, delivery, company, delivery < 2 and goes_alone(lease)) then
          ids[#ids + 1] = lease[1]
          deliveries[lease[1]] = lease[4] + 1
        elseif company > 0 and company < company_max then
          facts.model.has_suspects = true
        else
          facts.model.has_more = true
        end
      end
    end
    leases_seen = leases_seen + #leases
  until leases.err or #leases < LEASES_AT_ONCE or leases_seen >= LEASES_MAX
  if #ids == 0 then
    return
  end
  local entries = redis.call('XCLAIM', stream, GROUP, consumer, lease_ms, unpack(ids)) -- but for those that are gone
  if #entries == 0 then
    return
  end
  local counts = {}
  for i, entry in ipairs(entries) do
    counts[i] = deliveries[entry[1]]
  end
  answer[#answer + 1] = facts.field
  answer[#answer + 1] = entries
  answer[#answer + 1] = counts
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
  if leases_seen < LEASES_MAX then
    claim(facts)
  end
end
-- What was not looked at may be anything.
local is_unknown = leases_seen >= LEASES_MAX or redis.call('ZCARD', LEASED) > STREAMS_MAX
for _, name in ipairs(names) do
  if models[name].has_more or is_unknown then
    table.insert(answer[2], name)
  end
  if models[name].has_suspects then
    table.insert(answer[3], name)
  end
end
answer[1] = view_of(names, now)
return answer
