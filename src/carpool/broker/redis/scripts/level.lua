-- What waits in a shard. After plain reads of some streams also: see to it that this is known.
-- ARGV: now, number of models, models, then for each stream that was read: field, how many were to be read
-- Returns: what a batcher must know of the shard
local now, models = clock(ARGV[1]), {}
local at = 3
for _ = 1, tonumber(ARGV[2]) do
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
return view_of(models, now)
