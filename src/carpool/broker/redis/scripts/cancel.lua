-- Delete entries: those that nobody took, and those for which nobody waits any more.
-- ARGV: for each: field, id, 1 if nobody waits
-- Returns: for each of them 1 if it was deleted before somebody took it, else 0
local answer, touched, left = {}, {}, {}
write_also_without_memory(COUNTS)
for i = 1, #ARGV, 3 do
  local field, id = ARGV[i], ARGV[i + 1]
  local state = redis.pcall('XPENDING', stream_of(field), GROUP, id, id, 1)
  local removed = 0
  if state.err or not state[1] then -- no group, no lease
    removed = redis.pcall('XDEL', stream_of(field), id)
    removed = removed == 1 and 1 or 0
    touched[field] = touched[field] or removed == 1
  elseif ARGV[i + 2] == '1' then
    left[#left + 1] = { field, id, state[1][2] }
  end
  answer[#answer + 1] = removed
end
for field, is_changed in pairs(touched) do
  if is_changed then
    look_again(field)
  end
end
nobody_waits(left)
return answer
