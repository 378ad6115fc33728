"""Conditional writes as Lua scripts, which check and write atomically or refuse unchanged.

A script performs all checks before its first write, because Redis does not roll back. It returns `ok` or the name of
its refusal (`unisono.store.write_errors`) and a value. Each may be repeated: data that already exists counts as
written. Scripts use only commands of Redis 6.2, and all keys of a script are in one hash slot.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

PRELUDE = """
local function held(lease, fence, given)
  if given == '' then
    if redis.call('EXISTS', lease) == 1 then return 'busy' end
  elseif redis.call('GET', fence) ~= given then
    return 'taken'
  end
end

local next_arg = 1
local function arg()
  next_arg = next_arg + 1
  return ARGV[next_arg - 1]
end

local function read_log()
  local log = {first = tonumber(arg()), events = {}}
  for n = 1, tonumber(arg()) do log.events[n] = arg() end
  log.first_byte = tonumber(arg()) * 4
  log.tokens = arg()
  return log
end

local function check_log(log, stream, tokens)
  local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  log.upto = last and tonumber(string.match(last[1], '^%d+')) + 1 or 0
  if log.first > log.upto then return 'gap' end
  for n, data in ipairs(log.events) do
    local seq = log.first + n - 1
    if seq < log.upto then
      local id = string.format('%d-1', seq)
      local there = redis.call('XRANGE', stream, id, id)[1]
      if not there or there[2][2] ~= data then return 'differs' end
    end
  end
  log.bytes = redis.call('STRLEN', tokens)
  if log.first_byte > log.bytes then return 'gap' end
  if #log.tokens > 0 and log.first_byte < log.bytes then
    local after = log.first_byte + #log.tokens
    if after > log.bytes or redis.call('GETRANGE', tokens, log.first_byte, after - 1) ~= log.tokens then
      return 'differs'
    end
  end
end

local function write_log(log, stream, tokens, ttl)
  for n, data in ipairs(log.events) do
    local seq = log.first + n - 1
    if seq >= log.upto then redis.call('XADD', stream, string.format('%d-1', seq), 'd', data) end
  end
  if #log.tokens > 0 and log.first_byte == log.bytes then redis.call('APPEND', tokens, log.tokens) end
  redis.call('PEXPIRE', stream, ttl)
  redis.call('PEXPIRE', tokens, ttl)
end

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

-- Returns the id of the sequence of writes that this server continues. A failover or a restart starts a new sequence,
-- which may lack the last writes of the previous one. Empty if the server does not permit INFO.
local function history()
  local info = redis.pcall('INFO', 'replication')
  return type(info) == 'string' and string.match(info, 'master_replid:(%x+)') or ''
end

-- A failover may have lost a newer fence. A current lease with the given fence proves that no newer one was lost.
local function owns_history(record, lease, given, now)
  local was = redis.call('HGET', record, 'history')
  if not was or was == now then return true end
  return string.match(redis.call('GET', lease) or '', '^(%d+):') == given
end

-- A writer that continues a log exactly where it ends proves that nothing of it was lost. A write without content at
-- the beginning of a log proves nothing.
local function confirm_history(record, log, now)
  if log.first + log.first_byte == 0 or log.first ~= log.upto or log.first_byte ~= log.bytes then return end
  if redis.call('HGET', record, 'history') ~= now then redis.call('HSET', record, 'history', now) end
end

-- Number of the entry that closes a stream: no entry can follow it.
local ENDED = '9007199254740991-1'

local function clock()
  local now = redis.call('TIME')
  return tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
end
"""


@dataclass(frozen=True, slots=True)
class Script:
    """Script and whether it only reads. The result of a read needs no copy on a replica."""

    body: str
    is_read: bool = False
    text: str = field(init=False)
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", PRELUDE + self.body)
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest())


# Writes a response: its record, the rest of its event log and, with a revision, the items of its conversation.
# - A new response must not exist. Equal content counts as written, so that a write may be repeated.
# - A finished response does not change any more.
# - The conversation must have the given revision, or must already contain these items (`last` is their digest).
# - The end of a response closes its stream. The log then expires after the shorter `log_ttl`.
SAVE = Script(
    """
local record, stream, tokens, lease, fence, key, items, order = unpack(KEYS)
local new, given, head, input, output = arg() == '1', arg(), arg(), arg(), arg()
local terminal, ttl, log_ttl, channel, revision = arg(), arg(), arg(), arg(), arg()
local add, log = read_items(), read_log()
local was = redis.call('HMGET', record, 'head', 'input', 'output', 'terminal')
if new and was[1] then
  if was[1] == head and was[2] == input and was[3] == output then return {'ok'} end
  return {'exists'}
end
if not new and not was[1] then return {'missing'} end
if was[4] == '1' then
  if was[1] == head and was[3] == output then return {'ok'} end
  return {'finished'}
end
local no = held(lease, fence, given)
if no then return {no} end
local talk = nil
if revision ~= '' then
  talk = conversation(key)
  if not talk then return {'missing'} end
  if talk.revision == revision + 1 and talk.last == add.digest then
    talk = nil
  else
    if talk.revision ~= tonumber(revision) then return {'changed'} end
    no = check_items(add, talk, items)
    if no then return {no} end
    talk.revision = talk.revision + 1
  end
end
no = check_log(log, stream, tokens)
if no then return {no} end
redis.call('HSET', record, 'head', head, 'output', output, 'terminal', terminal)
if new then redis.call('HSET', record, 'input', input, 'history', history()) end
redis.call('PEXPIRE', record, ttl)
if talk then write_items(add, talk, key, items, order) end
write_log(log, stream, tokens, ttl)
if terminal == '1' and redis.call('EXISTS', stream) == 1 then
  redis.call('XADD', stream, ENDED, 'end', '')
  redis.call('PEXPIRE', stream, log_ttl)
  redis.call('PEXPIRE', tokens, log_ttl)
end
redis.call('PUBLISH', channel, '')
return {'ok'}
"""
)

# Appends events and tokens to the log of a response in progress. The event numbers are the stream ids, so that a
# repeated event is recognised and a gap is refused.
LOG = Script(
    """
local record, stream, tokens, lease, fence = unpack(KEYS)
local given, ttl, channel = arg(), arg(), arg()
local log = read_log()
local terminal = redis.call('HGET', record, 'terminal')
if not terminal then return {'missing'} end
local no = held(lease, fence, given)
if no then return {no} end
if terminal == '1' then return {'finished'} end
local now = history()
if not owns_history(record, lease, given, now) then return {'taken'} end
no = check_log(log, stream, tokens)
if no then return {no} end
write_log(log, stream, tokens, ttl)
confirm_history(record, log, now)
redis.call('PEXPIRE', record, ttl)
redis.call('PUBLISH', channel, '')
return {'ok'}
"""
)

# Takes over a response after its process stopped, under the lease of the new owner. Returns 0 if writes of the former
# owner may have been lost in a failover. The mark `incomplete` remains on the record: a third process must learn it
# too.
INHERIT = Script(
    """
local record, stream, tokens, lease, fence = unpack(KEYS)
local was = redis.call('HMGET', record, 'terminal', 'history', 'incomplete')
if not was[1] then return {'missing'} end
local no = held(lease, fence, arg())
if no then return {no} end
if was[1] == '1' then return {'finished'} end
local now = history()
local incomplete = was[3] or (was[2] and was[2] ~= now)
if was[2] ~= now then redis.call('HSET', record, 'history', now) end
if incomplete then redis.call('HSET', record, 'incomplete', '1') end
return {'ok', {incomplete and 0 or 1, now}}
"""
)

# Deletes a response and its log. The publication wakes readers that wait for its next event.
FORGET = Script(
    """
local record, stream, tokens = unpack(KEYS)
local there = redis.call('DEL', record)
redis.call('DEL', stream, tokens)
redis.call('PUBLISH', arg(), '')
return {'ok', there}
"""
)

# Creates a conversation with its first items. Items of an expired conversation with the same id may remain, because
# its keys expire one by one. They are deleted.
CREATE_CONVERSATION = Script(
    """
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

# Appends items to a conversation. Only one writer holds its lease. With a revision, the items are appended only to
# that state. A repetition of the last write is recognised by its digest.
APPEND = Script(
    """
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

# Reads items in the order of their positions. `after` is the id of an item with a prefix, or empty. Lua limits the
# number of values that `unpack` returns, so the items are read in groups of 1,000.
READ_ITEMS = Script(
    """
local key, items, order = unpack(KEYS)
local after, limit, newest_first = arg(), tonumber(arg()), arg() == '1'
if redis.call('EXISTS', key) == 0 then return {'missing'} end
local first = 0
if after ~= '' then
  local rank = redis.call(newest_first and 'ZREVRANK' or 'ZRANK', order, string.sub(after, 2))
  if not rank then return {'missing'} end
  first = rank + 1
end
if limit == 0 then return {'ok', {}} end
local last = limit < 0 and -1 or first + limit - 1
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

# Replaces the metadata of a conversation if nobody changed it meanwhile; every write renews the lifetime of all keys.
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

# Deletes one item. A conversation with a response in progress is refused, because that response was generated from
# its items. Without a digest in `last`, an earlier write cannot count as a repetition.
DELETE_ITEM = Script(
    """
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
    """
local key, items, order, lease, fence = unpack(KEYS)
if redis.call('EXISTS', key) == 0 then return {'ok', 0} end
local no = held(lease, fence, '')
if no then return {no} end
redis.call('DEL', key, items, order)
return {'ok', 1}
"""
)
