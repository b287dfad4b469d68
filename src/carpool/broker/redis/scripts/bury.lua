-- Keep a request that was no task as a dead letter; the oldest ones make room.
-- ARGV: now, number of the shard, most letters, owner, letter, input
-- Returns: the letter's id
return bury(body_of(ARGV[4], ARGV[5], ARGV[6]), clock(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]))
