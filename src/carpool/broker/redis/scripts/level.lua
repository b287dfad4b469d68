-- What waits in a shard. After plain reads of some streams also: see to it that this is known.
-- ARGV: now, ms after which a lease is over ('': nobody asks whether one is), number of models, models, then for each
--       stream that was read: field, how many were to be read
-- Returns: what a batcher must know of the shard
local STREAMS_MAX = 256

-- Whether a lease in this shard is over. What was looked at comes last the next time.
local function has_lapsed(lease_ms)
  write_also_without_memory(COUNTS)
  for _, field in ipairs(redis.call('ZRANGE', LEASED, 0, STREAMS_MAX - 1)) do
    local over = redis.pcall('XPENDING', stream_of(field), GROUP, 'IDLE', lease_ms, '-', '+', 1)
    if not over.err and #over > 0 then
      return 1
    end
    looked_at(field)
  end
  return 0
end

local now, models = clock(ARGV[1]), {}
local at = 4
for _ = 1, tonumber(ARGV[3]) do
  models[#models + 1] = ARGV[at]
  at = at + 1
end
if ARGV[at] then
  write_also_without_memory(COUNTS)
end
while ARGV[at] do
  local field, wanted = ARGV[at], tonumber(ARGV[at + 1])
  local before = tonumber(redis.call('HGET', SIZES, 'u' .. field) or '0')
  local left, place, model = look_again(field, models)
  leased(field)
  -- The read should have left nothing: what is there came in between, and no wakeup was sent for it.
  if left > 0 and before <= wanted then
    notify(field, model, place, left)
  end
  at = at + 2
end
return view_of(models, now, ARGV[2] ~= '' and has_lapsed(ARGV[2]))
