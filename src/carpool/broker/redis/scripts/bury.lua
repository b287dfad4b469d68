-- Keep a request that was no task as a dead letter; the oldest ones make room.
-- ARGV: now, number of the shard, most letters, most bytes of them, 1 if memory is short, letter, input
-- Returns: how many letters were dropped
local body = ARGV[6] .. ARGV[7]
return bury(body, clock(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == '1')
