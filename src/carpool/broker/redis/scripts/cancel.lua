-- Delete entries: those that no batcher has, and those for which nobody waits any more.
-- ARGV: for each: field, id, 1 if nobody waits, 2 if one that a batcher gave back stays
-- Returns: for each of them 1 if it was deleted while no batcher had it, else 0
local answer, touched, left = {}, {}, {}
write_also_without_memory(COUNTS)
for i = 1, #ARGV, 3 do
  local field, id = ARGV[i], ARGV[i + 1]
  local lease, removed = lease_of(field, id), 0
  local stays = lease and ARGV[i + 2] == '2' and was_given_back(lease)
  if lease and lease[3] >= GIVEN_BACK_MS and not stays then -- no batcher has it
    redis.call('XACK', stream_of(field), GROUP, id)
    removed = redis.call('XDEL', stream_of(field), id)
    count(field, -removed, 0)
  elseif lease and ARGV[i + 2] == '1' then
    left[#left + 1] = { field, id, lease[2] }
  elseif not lease and redis.pcall('XDEL', stream_of(field), id) == 1 then
    touched[field], removed = true, 1
  end
  answer[#answer + 1] = removed
end
for field in pairs(touched) do
  look_again(field)
end
nobody_waits(left)
return answer
