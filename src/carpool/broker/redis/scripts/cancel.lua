-- Delete entries that nobody took yet; tell batchers of those that they took, if nobody waits for them any more.
-- ARGV: for each: field, id, 1 if nobody waits
-- Returns: for each of them 1 if it was deleted, 0 if it was taken or has its outcome
local answer, touched, left = {}, {}, {}
write_also_without_memory(COUNTS)
for i = 1, #ARGV, 3 do
  local field, id = ARGV[i], ARGV[i + 1]
  local state = redis.pcall('XPENDING', stream_of(field), GROUP, id, id, 1)
  local removed = 0
  if state.err or not state[1] then -- no group, no lease
    removed = redis.call('XDEL', stream_of(field), id)
    touched[field] = touched[field] or removed == 1
  elseif ARGV[i + 2] == '1' then
    local consumer = state[1][2]
    left[consumer] = left[consumer] or {}
    table.insert(left[consumer], field .. ' ' .. id)
  end
  answer[#answer + 1] = removed
end
for field, is_changed in pairs(touched) do
  if is_changed then
    look_again(field)
  end
end
for consumer, entries in pairs(left) do
  redis.call('SPUBLISH', BELL, 'left ' .. consumer .. ' ' .. table.concat(entries, ' '))
end
return answer
