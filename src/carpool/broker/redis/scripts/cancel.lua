-- Delete entries that nobody took yet.
-- ARGV: pairs of field and id
-- Returns: for each of them 1 if it was deleted, 0 if it was taken or has its outcome
local answer, touched = {}, {}
write_also_without_memory(COUNTS)
for i = 1, #ARGV, 2 do
  local field, id = ARGV[i], ARGV[i + 1]
  local state = redis.pcall('XPENDING', stream_of(field), GROUP, id, id, 1)
  local removed = 0
  if state.err or not state[1] then -- no group, no lease
    removed = redis.call('XDEL', stream_of(field), id)
    touched[field] = touched[field] or removed == 1
  end
  answer[#answer + 1] = removed
end
for field, is_changed in pairs(touched) do
  if is_changed then
    look_again(field)
  end
end
return answer
