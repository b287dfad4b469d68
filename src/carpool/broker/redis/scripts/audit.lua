-- What a shard holds, and what its counts say, at one moment. Changes nothing.
-- Returns: held, unread and bytes of dead letters by the counts, these bytes in truth, dead letters, bytes of tasks'
--          inputs, of their results, then for each stream: field, model, length, pending entries (-1: it has no group),
--          names of other groups, and of each consumer with pending entries its name, how many, and ms since it was
--          last heard of
local streams = {}
local lanes = redis.call('HGETALL', LANES)
for i = 1, #lanes, 2 do
  local stream = stream_of(lanes[i])
  local _, _, model = read_about(lanes[i + 1])
  local length = redis.call('XLEN', stream)
  local pending, strangers, consumers = -1, {}, {}
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  for _, group in ipairs(groups.err and {} or groups) do
    -- name, <name>, consumers, <number>, pending, <number>, …
    if group[2] == GROUP then
      pending = group[6]
    else
      strangers[#strangers + 1] = group[2]
    end
  end
  if pending > 0 then
    for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', stream, GROUP)) do
      if consumer[4] > 0 then
        consumers[#consumers + 1] = { consumer[2], consumer[4], consumer[6] }
      end
    end
  end
  streams[#streams + 1] = { lanes[i], model, length, pending, strangers, consumers }
end
local letters, letter_bytes = redis.call('ZRANGE', LETTERS, 0, -1), 0
for _, id in ipairs(letters) do
  letter_bytes = letter_bytes + redis.call('HSTRLEN', LETTER_BODIES, id)
end
local answer = {
  count_of('held'), count_of('unread'), count_of('letter_bytes'), letter_bytes, #letters,
  count_of('input_bytes'), count_of('result_bytes') + count_of('read_bytes'),
}
for _, facts in ipairs(streams) do
  answer[#answer + 1] = facts
end
return answer
