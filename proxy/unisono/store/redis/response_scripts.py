"""Lua scripts that write, extend and delete stored responses with their event logs."""

from __future__ import annotations

from unisono.store.redis.script import ITEM_FUNCTIONS, LEASE_CHECK, Script

# Functions that check and write the event log of a response.
LOG_FUNCTIONS = """
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

-- Returns the id of the sequence of writes that this server continues. A failover or a restart starts a new sequence,
-- which may lack the last writes of the previous one. Empty if the server does not permit INFO.
local function history()
  local info = redis.pcall('INFO', 'replication')
  return type(info) == 'string' and string.match(info, 'master_replid:(%x+)') or ''
end

-- Returns false if the replication id or the epoch shows that another server was the primary after the log was last
-- known to be complete. If Sentinel names a former primary again without demoting it, only the epoch changes. Records
-- of earlier versions have no epoch.
local function in_history(record, now, epoch)
  local was = redis.call('HMGET', record, 'history', 'epoch')
  return (not was[1] or was[1] == now) and (not was[2] or was[2] == epoch)
end

-- A failover may have lost a newer fence. If the current lease has the given fence, no newer fence was lost.
local function owns_history(record, lease, given, now, epoch)
  if in_history(record, now, epoch) then return true end
  return string.match(redis.call('GET', lease) or '', '^(%d+):') == given
end

-- A write that begins exactly at the end of the log proves that the log is complete on this server, whose history is
-- then recorded. A write that begins at the start of the log proves nothing.
local function confirm_history(record, log, now, epoch)
  if log.first + log.first_byte == 0 or log.first ~= log.upto or log.first_byte ~= log.bytes then return end
  local was = redis.call('HMGET', record, 'history', 'epoch')
  if was[1] ~= now or was[2] ~= epoch then redis.call('HSET', record, 'history', now, 'epoch', epoch) end
end

-- Number of the entry that closes a stream: no entry can follow it.
local ENDED = '9007199254740991-1'
"""

# Writes a response: its record, the rest of its event log and, with a revision, the items of its conversation.
# - A new response must not exist. If it exists with equal content, the write is a repetition and changes nothing.
# - A finished response does not change any more.
# - The conversation must have the given revision, or must already contain these items (`last` is their digest).
# - The end of a response closes its stream. The log then expires after the shorter `log_ttl`.
SAVE = Script(
    LEASE_CHECK
    + ITEM_FUNCTIONS
    + LOG_FUNCTIONS
    + """
local record, stream, tokens, lease, fence, key, items, order = unpack(KEYS)
local new, given, head, input, output = arg() == '1', arg(), arg(), arg(), arg()
local terminal, ttl, log_ttl, channel, revision, epoch = arg(), arg(), arg(), arg(), arg(), arg()
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
if new then redis.call('HSET', record, 'input', input, 'history', history(), 'epoch', epoch) end
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
    LEASE_CHECK
    + LOG_FUNCTIONS
    + """
local record, stream, tokens, lease, fence = unpack(KEYS)
local given, ttl, channel, epoch = arg(), arg(), arg(), arg()
local log = read_log()
local terminal = redis.call('HGET', record, 'terminal')
if not terminal then return {'missing'} end
local no = held(lease, fence, given)
if no then return {no} end
if terminal == '1' then return {'finished'} end
local now = history()
if not owns_history(record, lease, given, now, epoch) then return {'taken'} end
no = check_log(log, stream, tokens)
if no then return {no} end
write_log(log, stream, tokens, ttl)
confirm_history(record, log, now, epoch)
redis.call('PEXPIRE', record, ttl)
redis.call('PUBLISH', channel, '')
return {'ok'}
"""
)

# Takes over a response after its process stopped, under the lease of the new owner. Returns 0 if writes of the former
# owner may have been lost in a failover. The field `incomplete` remains in the record, so that later owners read it
# too.
INHERIT = Script(
    LEASE_CHECK
    + LOG_FUNCTIONS
    + """
local record, stream, tokens, lease, fence = unpack(KEYS)
local given, epoch = arg(), arg()
local was = redis.call('HMGET', record, 'terminal', 'incomplete')
if not was[1] then return {'missing'} end
local no = held(lease, fence, given)
if no then return {no} end
if was[1] == '1' then return {'finished'} end
local now = history()
local incomplete = was[2] or not in_history(record, now, epoch)
redis.call('HSET', record, 'history', now, 'epoch', epoch)
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
