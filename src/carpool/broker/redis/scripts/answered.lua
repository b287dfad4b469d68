-- Accept a task whose result is known already: nothing is queued.
-- ARGV: id of the task, owner, what its client calls itself, result, ms that it is kept, most bytes of inputs and results,
--       now, where its outcome is sent ('' if nowhere), ms that its submitter may have no answer
-- Returns: as submit.lua, of one that was queued
local task, client, result, kept_ms, now = task_of(ARGV[1]), ARGV[3], ARGV[4], tonumber(ARGV[5]), clock(ARGV[7])
local size = #result + #client + #ARGV[8] + TASK_BYTES
make_room(size, tonumber(ARGV[6]), 1, now)
local stored = stored_bytes()
if stored > 0 and stored + size > tonumber(ARGV[6]) then
  return redis.error_reply('STOREFULL no room')
end
local id = string.format('%.0f-0', now)
redis.call('HSET', task, 'o', ARGV[2], 'e', id)
if client ~= '' then
  redis.call('HSET', task, 'c', client)
end
if ARGV[8] ~= '' then
  redis.call('HSET', task, 'h', ARGV[8])
end
note_unsure({ ARGV[1] }, now, tonumber(ARGV[9]))
keep_result(task, nil, 'S', result, now, kept_ms)
return { id, 1, count_of('held'), redis.call('HLEN', OPENERS) }
