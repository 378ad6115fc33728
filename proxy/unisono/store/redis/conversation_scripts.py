"""Lua scripts for conversations and their items."""

from __future__ import annotations

from unisono.store.redis.leases import LEASE_CHECK
from unisono.store.redis.script import Script

# Functions that check and write new items of a conversation.
ITEM_FUNCTIONS = """
local function read_items()
  local add = {digest = arg(), cap = tonumber(arg()), ttl = arg(), ids = {}, data = {}, size = 0}
  for n = 1, tonumber(arg()) do
    add.ids[n] = arg()
    add.data[n] = arg()
    add.size = add.size + #add.data[n]
  end
  return add
end

local function conversation(key)
  local was = redis.call('HMGET', key, 'head', 'revision', 'upto', 'bytes', 'last')
  if was[1] then
    return {
      head = was[1], revision = tonumber(was[2]), upto = tonumber(was[3]), bytes = tonumber(was[4]), last = was[5]
    }
  end
end

local function check_items(add, was, items)
  if was.bytes + add.size > add.cap then return 'large' end
  local seen = {}
  for _, id in ipairs(add.ids) do
    if seen[id] or redis.call('HEXISTS', items, id) == 1 then return 'repeated' end
    seen[id] = true
  end
end

local function write_items(add, was, key, items, order)
  redis.call('HSET', key, 'revision', was.revision, 'upto', was.upto + #add.ids, 'bytes', was.bytes + add.size,
    'last', add.digest)
  for n, id in ipairs(add.ids) do
    redis.call('HSET', items, id, add.data[n])
    redis.call('ZADD', order, was.upto + n - 1, id)
  end
  redis.call('PEXPIRE', key, add.ttl)
  redis.call('PEXPIRE', items, add.ttl)
  redis.call('PEXPIRE', order, add.ttl)
end
"""

# Creates a conversation with its first items. Items of an expired conversation with the same id may remain, because
# its keys expire one by one. They are deleted.
CREATE_CONVERSATION = Script(
    ITEM_FUNCTIONS
    + """
local key, items, order = unpack(KEYS)
local head, add = arg(), read_items()
local was = conversation(key)
if was then
  if was.head == head and was.revision == 0 and was.last == add.digest then return {'ok'} end
  return {'exists'}
end
was = {revision = 0, upto = 0, bytes = 0}
local no = check_items(add, was, items)
if no then return {no} end
redis.call('HSET', key, 'head', head)
redis.call('DEL', items, order)
write_items(add, was, key, items, order)
return {'ok'}
"""
)

# Appends items to a conversation. The caller needs the current lease, or there must be no lease. With a revision, the
# conversation must still have this revision. A repetition of the last write is recognised by the digest of its items,
# and changes nothing.
APPEND = Script(
    LEASE_CHECK
    + ITEM_FUNCTIONS
    + """
local key, items, order, lease, fence = unpack(KEYS)
local given, revision, add = arg(), arg(), read_items()
local was = conversation(key)
if not was then return {'missing'} end
if revision ~= '' and was.revision == revision + 1 and was.last == add.digest then return {'ok', was.revision} end
local no = held(lease, fence, given)
if no then return {no} end
if revision ~= '' and was.revision ~= tonumber(revision) then return {'changed'} end
no = check_items(add, was, items)
if no then return {no} end
was.revision = was.revision + 1
write_items(add, was, key, items, order)
return {'ok', was.revision}
"""
)

# Reads items in the order of their positions. `after` is empty, or `=` followed by the id of the item that precedes the
# first result. `upto` is empty, or the position of the first item that is not read. Lua limits the number of values
# that `unpack` returns, so the items are read in groups of 1,000.
READ_ITEMS = Script(
    """
local key, items, order = unpack(KEYS)
local after, limit, newest_first, upto = arg(), tonumber(arg()), arg() == '1', arg()
if redis.call('EXISTS', key) == 0 then return {'missing'} end
local end_rank = redis.call('ZCARD', order)
local hidden = upto == '' and 0 or redis.call('ZCOUNT', order, upto, '+inf')
local first = 0
if newest_first then first = hidden else end_rank = end_rank - hidden end
if after ~= '' then
  local rank = redis.call(newest_first and 'ZREVRANK' or 'ZRANK', order, string.sub(after, 2))
  if not rank then return {'missing'} end
  first = math.max(first, rank + 1)
end
local last = limit < 0 and end_rank - 1 or math.min(first + limit, end_rank) - 1
if last < first then return {'ok', {}} end
local ids = redis.call(newest_first and 'ZREVRANGE' or 'ZRANGE', order, first, last)
local found = {}
for from = 1, #ids, 1000 do
  for _, data in ipairs(redis.call('HMGET', items, unpack(ids, from, math.min(from + 999, #ids)))) do
    found[#found + 1] = data
  end
end
return {'ok', found}
""",
    is_read=True,
)

# Replaces the metadata of a conversation, unless the metadata have changed since the caller read them. Like every
# write, it renews the lifetime of all keys of the conversation.
SET_HEAD = Script(
    """
local key, items, order = unpack(KEYS)
local before, head, ttl = arg(), arg(), arg()
local was = redis.call('HGET', key, 'head')
if not was then return {'missing'} end
if was ~= before and was ~= head then return {'changed'} end
redis.call('HSET', key, 'head', head)
redis.call('PEXPIRE', key, ttl)
redis.call('PEXPIRE', items, ttl)
redis.call('PEXPIRE', order, ttl)
return {'ok'}
"""
)

# Deletes one item. Refuses while a response is in progress, because this response is generated from the items of the
# conversation. `last` is emptied, so that no later write is mistaken for a repetition of the last one.
DELETE_ITEM = Script(
    LEASE_CHECK
    + """
local key, items, order, lease, fence = unpack(KEYS)
local id = arg()
if redis.call('EXISTS', key) == 0 then return {'ok', 0} end
local no = held(lease, fence, '')
if no then return {no} end
local size = redis.call('HSTRLEN', items, id)
if redis.call('HDEL', items, id) == 0 then return {'ok', 0} end
redis.call('ZREM', order, id)
redis.call('HINCRBY', key, 'bytes', -size)
redis.call('HINCRBY', key, 'revision', 1)
redis.call('HSET', key, 'last', '')
return {'ok', 1}
"""
)

DELETE_CONVERSATION = Script(
    LEASE_CHECK
    + """
local key, items, order, lease, fence = unpack(KEYS)
if redis.call('EXISTS', key) == 0 then return {'ok', 0} end
local no = held(lease, fence, '')
if no then return {no} end
redis.call('DEL', key, items, order)
return {'ok', 1}
"""
)
