-- Keep a request that was no task as a dead letter; the oldest ones make room.
-- KEYS: letters, letter bodies, counts
-- ARGV: now, number of the shard, most letters, owner, letter, input
-- Returns: the letter's id
local body = body_of(ARGV[4], ARGV[5], ARGV[6])
return bury(KEYS[1], KEYS[2], KEYS[3], body, clock(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]))
