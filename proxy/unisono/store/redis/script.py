"""Conditional writes as Lua scripts, their common functions, and builders of arguments.

A script performs all checks before its first write, because Redis does not roll back. It returns `ok` and a value, or
the name of a refusal from the table in `unisono.store.write_errors`. Each script may be repeated: a repetition finds
its data stored and returns `ok`. Scripts use only commands of Redis 6.2, and all keys of a script are in one hash slot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import field

from unisono.core.frozen import dataclass
from unisono.core.state_store import Lease, LogWrite, Retention, StoredItem
from unisono.store import codec
from unisono.store.codec import StateLimits
from unisono.store.write_errors import refusal

# Functions for all scripts.
PRELUDE = """
local next_arg = 1
local function arg()
  next_arg = next_arg + 1
  return ARGV[next_arg - 1]
end

local function clock()
  local now = redis.call('TIME')
  return tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
end
"""

# Function that returns the refusal of a write, or nil. A caller without a lease gives an empty fence, and is refused
# while there is a lease. Any other caller must give the current fence.
LEASE_CHECK = """
local function held(lease, fence, given)
  if given == '' then
    if redis.call('EXISTS', lease) == 1 then return 'busy' end
  elseif redis.call('GET', fence) ~= given then
    return 'taken'
  end
end
"""

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


@dataclass(frozen=True, slots=True)
class Script:
    """Lua script. `is_read` is True if it only reads, so that no replica has to acknowledge it."""

    body: str
    is_read: bool = False
    text: str = field(init=False)
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", PRELUDE + self.body)
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest())


Args = list[str | bytes | int]


def milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def fence(tenant: str, anchor: str, lease: Lease | None) -> str:
    """Return the fence of a lease as text, or an empty string if `lease` is None.

    Raises `StoreConflict` if the lease belongs to a different tenant or anchor.
    """
    if lease is None:
        return ""
    if (lease.tenant, lease.anchor) != (tenant, anchor):
        raise refusal("taken")
    return str(lease.fence)


def of_items(items: Sequence[StoredItem], retention: Retention, bounds: StateLimits) -> Args:
    """Return the arguments for new items of a conversation, the field `items` of requests.

    Raises `StoreTooLarge` if an item exceeds `bounds.item`.
    """
    encoded = codec.encode_each(items, bounds, at="items")
    digest = hashlib.sha256(b"".join(b"%d:" % len(data) + data for data in encoded)).hexdigest()
    args: Args = [digest, bounds.conversation, milliseconds(retention.conversation_s), len(items)]
    for item, data in zip(items, encoded, strict=True):
        args += [item.id, data]
    return args


def of_log(log: LogWrite) -> Args:
    return [log.first_event, len(log.events), *log.events, log.first_token, codec.encode_tokens(log.tokens)]
