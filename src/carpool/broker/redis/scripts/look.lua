-- A task's state. While it has no result, a gateway may ask to be told when it has. One whose time is over, and that no
-- batcher ends, because none serves its model any more, has failed.
-- ARGV: id of the task, the gateway's name, without spaces ('': it need not be told), now, the result of one whose time is
--       over, ms that this is kept, 1 to be told where it stands, the receipt for its end
-- Returns: status, owner, ms, result, each nil if there is none; 1 if its time was over; then its model, its age in ms and
--          its field; if it waits, and that was asked for: model, how many of this shard go before it, -1 if it was taken;
--          in any case, at the end, ms from its submission to its result, or until now; what its client calls itself
local NAMES_BYTES_MAX = 4096

-- Whether an entry was taken.
local function was_taken(field, id)
  local _, last = group_of(stream_of(field))
  local ms, number = string.match(id, '^(%d+)-(%d+)$')
  local last_ms, last_number = string.match(last or '0-0', '^(%d+)-(%d+)$')
  if ms == last_ms then
    return tonumber(number) <= tonumber(last_number)
  end
  return tonumber(ms) < tonumber(last_ms)
end

-- How many go before a task, by counts and without a look at entries. In its own stream it has a number: of those before
-- it, all were taken that do not wait and were not removed before that. Of another stream those go first that came before
-- its place: as many as if they had come evenly since the first that waits.
local function ahead_of(field, id, number, now)
  local offset, _, model = about(field)
  if not model or not number then -- the version before gave it none
    return
  end
  local sizes = redis.call('HMGET', SIZES, 'n' .. field, 'u' .. field)
  local added, unread = tonumber(sizes[1] or '0'), tonumber(sizes[2] or '0')
  local gone = gone_of(field)
  local taken, gone_before = added - unread - redis.call('ZCARD', gone), redis.call('ZCOUNT', gone, '-inf', number)
  local own = math.min(number - taken - gone_before, unread)
  if own < 1 then
    if was_taken(field, id) then
      return model, -1
    end
    own = 1 -- so many were removed that some are forgotten
  end
  local place, ahead = ms_of(id) + offset, own - 1
  local heads = redis.call('ZRANGE', heads_of(model), 0, HEADS_MAX - 1, 'WITHSCORES')
  for i = 1, #heads, 2 do
    local other, head = heads[i], tonumber(heads[i + 1])
    if other ~= field and head < place then
      local newest = now + (about(other) or 0)
      local share = newest > head and math.min((place - head) / (newest - head), 1) or 1
      ahead = ahead + share * tonumber(redis.call('HGET', SIZES, 'u' .. other) or '0')
    end
  end
  return model, math.floor(ahead + 0.5)
end

local task, gateway, now = task_of(ARGV[1]), ARGV[2], clock(ARGV[3])
local state = redis.call('HMGET', task, 's', 'o', 't', 'r', 'b', 'f', 'e', 'd', 'n', 'c')
local was_over, model, ahead = 0, nil, nil
if state[1] == 'P' then
  -- It has its own deadline, or the part that its bytes count in ends soon after its time.
  local over_at = tonumber(state[8] or string.match(state[5] or '', ':(%d+)$'))
  if over_at and over_at < now and not is_unsure(ARGV[1], now) then
    write_also_without_memory(COUNTS)
    local _, _, its_model = about(state[6])
    model, ahead = its_model or '', state[7] and now - ms_of(state[7]) or 0
    keep_result(task, state[5], 'F', ARGV[4], now, tonumber(ARGV[5]))
    if not lease_of(state[6], state[7]) then
      leaves_line(state[6], state[9])
    end
    forget_entries(state[6], { state[7] }, now)
    note_ends(ARGV[7], { ARGV[1], state[2] or '', model, ahead, state[6] or '' })
    state[1], state[3], state[4], was_over = 'F', now, ARGV[4], 1
  elseif gateway ~= '' then
    local names = redis.call('HGET', task, 'w') or ''
    if not string.find(' ' .. names .. ' ', ' ' .. gateway .. ' ', 1, true) then
      -- Gateways look again by themselves: it does no harm if some are not told, or if there is no memory for this.
      local others = (names == '' or #names > NAMES_BYTES_MAX) and '' or names .. ' '
      redis.pcall('HSET', task, 'w', others .. gateway)
    end
  end
end
if state[1] == 'P' and ARGV[6] == '1' then
  model, ahead = ahead_of(state[6], state[7], tonumber(state[9]), now)
end
local age = state[1] and state[7] and (state[1] == 'P' and now or tonumber(state[3])) - ms_of(state[7]) or 0
return {
  state[1], state[2], state[3], state[4], was_over, model or false, ahead or false, state[6], age, state[10] or '',
}
