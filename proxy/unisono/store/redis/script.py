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
