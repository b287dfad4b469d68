-- Keep a request that was no task as a dead letter; the oldest ones make room.
-- KEYS: letters, letter bodies, counts
-- ARGV: now, number of the shard, most letters, most bytes of them, 1 if memory is short, owner, letter, input
-- Returns: how many letters were dropped
local body = body_of(ARGV[6], ARGV[7], ARGV[8])
local now, shard = clock(ARGV[1]), tonumber(ARGV[2])
return bury(KEYS[1], KEYS[2], KEYS[3], body, now, shard, tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == '1')
