"""Lua scripts that reserve, extend and settle the quota of an account."""

from __future__ import annotations

from unisono.core.quotas import WINDOW_S
from unisono.store.redis.script import Script

CLAIMS = """
local window = __WINDOW__

local function drop_lapsed(open, held, now)
  for _, once in ipairs(redis.call('ZRANGEBYSCORE', open, '-inf', now)) do
    redis.call('ZREM', open, once)
    redis.call('HDEL', held, once)
  end
end

local function drop_before(minute, first, sums)
  local fields = redis.call('HGETALL', minute)
  for n = 1, #fields, 2 do
    local kind, at = string.match(fields[n], '^([rt])(%d+)$')
    if at and tonumber(at) < first then
      local name = kind == 'r' and 'requests' or 'tokens'
      sums[name] = sums[name] - tonumber(fields[n + 1])
      redis.call('HDEL', minute, fields[n])
    end
  end
end

-- Returns the numbers of requests and tokens in the last minute, and for each the last second that has any. In the
-- hash, the fields r1700000000 and t1700000000 are the requests and tokens of one second; 'oldest' is the first second
-- that may have such fields; 'requests' and 'tokens' are the sums over all seconds.
local function read_minute(minute, second)
  local head = redis.call('HMGET', minute, 'oldest', 'requests', 'tokens', 'last_requests', 'last_tokens')
  local function number(n) return tonumber(head[n] or 0) end
  local sums = {oldest = number(1), requests = number(2), tokens = number(3)}
  sums.last_requests, sums.last_tokens = number(4), number(5)
  local first = second - window
  if sums.oldest == 0 or (sums.last_requests < first and sums.last_tokens < first) then
    redis.call('DEL', minute)
    return {oldest = second, requests = 0, tokens = 0, last_requests = 0, last_tokens = 0}
  end
  if sums.oldest < first then
    local ended, from = {}, math.max(sums.oldest, first - 2 * window)
    -- Fields this old remain only if settlements continued for over two windows without a new reservation.
    if from > sums.oldest then drop_before(minute, from, sums) end
    for at = from, first - 1 do
      ended[#ended + 1] = 'r' .. at
      ended[#ended + 1] = 't' .. at
    end
    local amounts = redis.call('HMGET', minute, unpack(ended))
    for n = 1, #ended, 2 do
      sums.requests = sums.requests - tonumber(amounts[n] or 0)
      sums.tokens = sums.tokens - tonumber(amounts[n + 1] or 0)
    end
    redis.call('HDEL', minute, unpack(ended))
    redis.call('HSET', minute, 'oldest', first, 'requests', sums.requests, 'tokens', sums.tokens)
    sums.oldest = first
  end
  if sums.last_requests < first then sums.last_requests = 0 end
  if sums.last_tokens < first then sums.last_tokens = 0 end
  return sums
end

-- Called when the second `at` has no tokens left. If `at` is 'last_tokens', finds the previous second with tokens.
local function forget_second(minute, at)
  if tonumber(redis.call('HGET', minute, 'last_tokens') or 0) ~= at then return end
  local oldest = tonumber(redis.call('HGET', minute, 'oldest'))
  repeat at = at - 1 until at < oldest or tonumber(redis.call('HGET', minute, 't' .. at) or 0) > 0
  redis.call('HSET', minute, 'last_tokens', math.max(at, oldest - 1))
end

-- Milliseconds until the second `at` leaves the window; 0 if `at` is 0, which means no second.
local function until_free(at, now) return at > 0 and (at + window + 1) * 1000 - now or 0 end

-- Milliseconds until at least `much` requests (kind 'r') or tokens (kind 't') have left the window. This is slow, so it
-- is called for refused requests only.
local function frees(minute, kind, much, now)
  local seconds, amounts, fields = {}, {}, redis.call('HGETALL', minute)
  for n = 1, #fields, 2 do
    local at, amount = tonumber(string.match(fields[n], '^' .. kind .. '(%d+)$')), tonumber(fields[n + 1])
    if at and amount > 0 then
      seconds[#seconds + 1] = at
      amounts[at] = amount
    end
  end
  table.sort(seconds)
  local again = 0
  for _, at in ipairs(seconds) do
    if much <= 0 then break end
    again = until_free(at, now)
    much = much - amounts[at]
  end
  return again
end
""".replace("__WINDOW__", str(WINDOW_S))

RESERVE = Script(
    CLAIMS
    + """
local share, claims = tonumber(arg()), {}
for n = 1, #KEYS, 4 do
  local claim = {minute = KEYS[n], open = KEYS[n + 1], held = KEYS[n + 2], spent = KEYS[n + 3], once = arg()}
  claim.input, claim.least, claim.most = tonumber(arg()), tonumber(arg()), tonumber(arg())
  claim.input_cost, claim.output_price, claim.for_ms = tonumber(arg()), tonumber(arg()), tonumber(arg())
  claim.ends_ms, claim.owed = tonumber(arg()), arg() == '1'
  claim.rpm, claim.tpm, claim.parallel = tonumber(arg()), tonumber(arg()), tonumber(arg())
  claim.token_budget, claim.money_budget = tonumber(arg()), tonumber(arg())
  claim.reads_spent = arg() == '1'
  claim.tokens = claim.input + claim.least
  claims[#claims + 1] = claim
end
local now = clock()
local second = math.floor(now / 1000)
-- A server without free memory checks only the first write of a script, and only if this write may need memory. Adding
-- 0 here makes such a server reject the reservation, because it would also reject the settlement.
redis.call('HINCRBY', claims[1].minute, 'requests', 0)

local answers = {}
local function add_status(claim, refused, again, output)
  local sums = claim.sums
  local left_requests = claim.rpm and math.max(0, claim.rpm - sums.requests) or -1
  local left_tokens = claim.tpm and math.max(0, claim.tpm - sums.tokens) or -1
  local all_requests, all_tokens = until_free(sums.last_requests, now), until_free(sums.last_tokens, now)
  answers[#answers + 1] = {refused, again or -1, output or -1, left_requests, all_requests, left_tokens, all_tokens,
    claim.spent_cost or -1}
end

-- Returns the output tokens that the budgets permit, or nil and the exhausted budget.
local function find_room(claim, used_tokens, used_cost)
  local room, least, owed = claim.most, claim.least, claim.owed
  if claim.token_budget then
    local left = claim.token_budget - used_tokens - claim.input
    if left < 1 and not owed then return nil, 'token_budget' end
    room = math.min(room, math.max(least, math.floor(left / share)), math.max(left, owed and least or 0))
  end
  if claim.money_budget then
    local left = claim.money_budget - used_cost - claim.input_cost
    if (left < 0 or used_cost >= claim.money_budget) and not owed then return nil, 'money_budget' end
    if claim.output_price > 0 then
      local left_output = math.floor(math.max(left, 0) * 1000000 / claim.output_price)
      if left_output < 1 and not owed then return nil, 'money_budget' end
      room = math.min(room, math.max(least, math.floor(left_output / share)),
        math.max(left_output, owed and least or 0))
    end
  end
  return room
end

-- Returns the limit that refuses a claim and, if known, the milliseconds until it would accept the claim. Returns nil
-- if no limit refuses. Sets claim.room to the permitted output tokens if the claim has a budget.
local function refusal(claim)
  local sums, tokens = claim.sums, claim.tokens
  if not claim.owed then
    if claim.rpm and sums.requests + 1 > claim.rpm then
      local again = frees(claim.minute, 'r', sums.requests + 1 - claim.rpm, now)
      return 'requests', claim.rpm > 0 and again or nil
    end
    if claim.tpm and sums.tokens + tokens > claim.tpm then
      local again = frees(claim.minute, 't', sums.tokens + tokens - claim.tpm, now)
      return 'tokens', tokens <= claim.tpm and again or nil
    end
    if claim.parallel and redis.call('ZCARD', claim.open) >= claim.parallel then return 'parallel' end
  end
  -- A soft budget never refuses a claim, but its state is reported.
  if not claim.token_budget and not claim.reads_spent then return end
  local sum = redis.call('HMGET', claim.spent, 'tokens', 'cost')
  local spent_tokens, spent_cost = tonumber(sum[1] or 0), tonumber(sum[2] or 0)
  local used_tokens, used_cost = spent_tokens, spent_cost
  claim.spent_cost = spent_cost
  if not claim.token_budget and not claim.money_budget then return end
  for _, one in ipairs(redis.call('HVALS', claim.held)) do
    local held_tokens, held_cost = string.match(one, '^%d+:%d+:(%d+):(%d+):')
    used_tokens, used_cost = used_tokens + tonumber(held_tokens), used_cost + tonumber(held_cost)
  end
  claim.room = find_room(claim, used_tokens, used_cost)
  if not claim.room then
    local _, budget = find_room(claim, spent_tokens, spent_cost)
    if not budget then return 'budget_reserved' end
    return budget, claim.ends_ms >= 0 and math.max(0, claim.ends_ms - now) or nil
  end
end

local room
for n, claim in ipairs(claims) do
  drop_lapsed(claim.open, claim.held, now)
  claim.sums = read_minute(claim.minute, second)
  local there = redis.call('HGET', claim.held, claim.once)
  if there then
    -- This call repeats an earlier one, which reserved all claims. Return the same statuses.
    add_status(claim, '', nil, tonumber(string.match(there, ':(-?%d+)$')))
  else
    local refused, again = refusal(claim)
    if refused then
      -- Return the statuses of the claims up to the refused one, so that the last status is the refusal.
      answers = {}
      for before = 1, n - 1 do add_status(claims[before], '') end
      add_status(claim, refused, again)
      return {'ok', answers}
    end
    if claim.room then room = math.min(room or claim.room, claim.room) end
  end
end
if #answers > 0 then return {'ok', answers} end

for _, claim in ipairs(claims) do
  local sums, tokens, minute = claim.sums, claim.tokens, claim.minute
  local requests = claim.owed and 0 or 1
  local output, cost = -1, 0
  if claim.room then
    output = room
    cost = claim.input_cost + math.ceil(output * claim.output_price / 1000000)
  end
  sums.requests = sums.requests + requests
  sums.tokens = sums.tokens + tokens
  -- Minimum and maximum are needed because the clock may have been set back.
  sums.oldest = math.min(sums.oldest, second)
  if requests > 0 then sums.last_requests = math.max(sums.last_requests, second) end
  if tokens > 0 then sums.last_tokens = math.max(sums.last_tokens, second) end
  redis.call('HINCRBY', minute, 'r' .. second, requests)
  redis.call('HINCRBY', minute, 't' .. second, tokens)
  redis.call('HSET', minute, 'oldest', sums.oldest, 'requests', sums.requests, 'tokens', sums.tokens,
    'last_requests', sums.last_requests, 'last_tokens', sums.last_tokens)
  redis.call('PEXPIRE', minute, (window + 2) * 1000)
  redis.call('ZADD', claim.open, now + claim.for_ms, claim.once)
  redis.call('HSET', claim.held, claim.once,
    string.format('%d:%d:%d:%d:%d', second, tokens, claim.input + math.max(output, 0), cost, output))
  redis.call('PEXPIRE', claim.open, claim.for_ms + 60000)
  redis.call('PEXPIRE', claim.held, claim.for_ms + 60000)
  add_status(claim, '', nil, output)
end
return {'ok', answers}
"""
)

# Undoes the reservation of one claim. In a cluster, claims in several slots are reserved one after the other; if one is
# refused, the claims before it are undone.
UNDO_CLAIM = Script(
    CLAIMS
    + """
local minute, open, held = unpack(KEYS)
local once, requests = arg(), tonumber(arg())
local there = redis.call('HGET', held, once)
if not there then return {'ok'} end
local at, tokens = string.match(there, '^(%d+):(%d+):')
redis.call('HDEL', held, once)
redis.call('ZREM', open, once)
if redis.call('HEXISTS', minute, 'r' .. at) == 1 then
  redis.call('HINCRBY', minute, 'r' .. at, -requests)
  redis.call('HINCRBY', minute, 'requests', -requests)
  redis.call('HINCRBY', minute, 'tokens', -tonumber(tokens))
  if redis.call('HINCRBY', minute, 't' .. at, -tonumber(tokens)) == 0 then forget_second(minute, tonumber(at)) end
end
return {'ok'}
"""
)

EXTEND_CLAIMS = Script(
    CLAIMS
    + """
local open, held = unpack(KEYS)
local now, for_ms = clock(), tonumber(arg())
drop_lapsed(open, held, now)
for n = next_arg, #ARGV do redis.call('ZADD', open, 'XX', now + for_ms, ARGV[n]) end
redis.call('PEXPIRE', open, for_ms + 60000)
redis.call('PEXPIRE', held, for_ms + 60000)
return {'ok'}
"""
)

SETTLE = Script(
    CLAIMS
    + """
local ledger, mark, served_ledger, minute, open, held, spent = unpack(KEYS)
local model, served, settled_ms, claimed, once = arg(), arg(), arg(), arg() == '1', arg()
local past_ms, used = tonumber(arg()), arg()
-- The mark holds the amounts of this settlement that are already counted, as '<name>=<amount>'. Earlier versions
-- counted all amounts at once and then wrote an empty mark.
local mark_before = redis.call('GET', mark)
local counted, added, amounts, has_more = {}, {}, {}, not mark_before
for name, amount in string.gmatch(mark_before or '', '(%a+)=(%d+)') do counted[name] = tonumber(amount) end
for name, amount in string.gmatch(used, '(%a+)=(%d+)') do
  local before = counted[name] or 0
  added[name] = mark_before ~= '' and math.max(tonumber(amount) - before, 0) or 0
  if added[name] > 0 then has_more = true end
  amounts[#amounts + 1] = string.format('%s=%.0f', name, before + added[name])
end
local begun = 0
if has_more then
  redis.call('SET', mark, table.concat(amounts, ' '), 'PX', settled_ms)
  local known = redis.call('EXISTS', ledger)
  -- The first hash holds all usage by requested model, as earlier versions read it. The second hash holds the part of
  -- this usage that a different model answered.
  for name, amount in pairs(added) do
    if amount > 0 then
      redis.call('HINCRBY', ledger, name .. ':' .. model, amount)
      if served ~= '' then redis.call('HINCRBY', served_ledger, name .. ':' .. served, amount) end
    end
  end
  begun = redis.call('EXISTS', ledger) - known
end
if not claimed then return {'ok', begun} end
local tokens_added = added.input + added.output
local second = math.floor(clock() / 1000)
local there = redis.call('HGET', held, once)
if there then
  local at, tokens = string.match(there, '^(%d+):(%d+):')
  local more = tokens_added - tonumber(tokens)
  if more > 0 then
    local oldest = tonumber(redis.call('HGET', minute, 'oldest') or second)
    redis.call('HSET', minute, 'oldest', math.min(oldest, second))
    redis.call('HINCRBY', minute, 't' .. second, more)
    redis.call('HINCRBY', minute, 'tokens', more)
    redis.call('HSET', minute, 'last_tokens', second)
    redis.call('PEXPIRE', minute, (window + 2) * 1000)
  elseif redis.call('HEXISTS', minute, 't' .. at) == 1 then
    redis.call('HINCRBY', minute, 'tokens', more)
    if redis.call('HINCRBY', minute, 't' .. at, more) == 0 then forget_second(minute, tonumber(at)) end
  end
  redis.call('HDEL', held, once)
  redis.call('ZREM', open, once)
end
if not has_more then return {'ok', begun} end
redis.call('HINCRBY', spent, 'tokens', tokens_added)
redis.call('HINCRBY', spent, 'cost', added.cost)
if past_ms >= 0 then redis.call('PEXPIREAT', spent, past_ms) end
return {'ok', begun}
"""
)

# Raises the tokens and the cost of a budget period to at least the given amounts.
RAISE_SPENT = Script(
    """
local spent = KEYS[1]
local tokens, cost, past_ms = tonumber(arg()), tonumber(arg()), tonumber(arg())
local sum = redis.call('HMGET', spent, 'tokens', 'cost')
local function highest(amount, before) return string.format('%.0f', math.max(amount, tonumber(before or 0))) end
redis.call('HSET', spent, 'tokens', highest(tokens, sum[1]), 'cost', highest(cost, sum[2]))
if past_ms >= 0 then redis.call('PEXPIREAT', spent, past_ms) end
return {'ok'}
"""
)
