"""Leases, background runs, idempotency keys, secrets and counters on Redis; their scripts."""

from __future__ import annotations

import orjson

from unisono.core.state_store import BackgroundRun, Lease, Retention
from unisono.store.redis import keys
from unisono.store.redis.connection import Link
from unisono.store.redis.script import Args, Script, milliseconds

# Function that renews the conversation of a lease, because it must not expire while a response of it is running.
KEEP_CONVERSATION = """
local function keep_conversation(ttl)
  for n = 3, 5 do redis.call('PEXPIRE', KEYS[n], ttl) end
end
"""

# The fence is the time in milliseconds, or the last fence plus one if that is greater. After a failover, a former
# primary and the new primary may both accept leases for the same response. With plain counters, these leases could have
# the same fence. The key of a lease expires when its reserved time
# ends.
ACQUIRE = Script(
    KEEP_CONVERSATION
    + """
local lease, fence = unpack(KEYS)
local owner, for_ms, force, ttl, reserve, kept = arg(), arg(), arg() == '1', arg(), tonumber(arg()), arg()
local was = redis.call('GET', lease)
if was then
  local number, holder = string.match(was, '^(%d+):(.*)$')
  if holder == owner then
    redis.call('SET', lease, was, 'PX', for_ms)
    redis.call('PEXPIRE', fence, ttl)
    return {'ok', tonumber(number)}
  end
  if string.match(holder, '[^:]*$') ~= string.match(owner, '[^:]*$') then return {'ok', 0} end
  if not force and redis.call('PTTL', lease) > reserve then return {'ok', 0} end
end
local number = string.format('%d', math.max(tonumber(redis.call('GET', fence) or 0) + 1, clock()))
redis.call('SET', fence, number, 'PX', ttl)
redis.call('SET', lease, number .. ':' .. owner, 'PX', for_ms)
keep_conversation(kept)
return {'ok', tonumber(number)}
"""
)

EXTEND = Script(
    KEEP_CONVERSATION
    + """
local lease, fence = unpack(KEYS)
local owner, given, for_ms, ttl, kept = arg(), arg(), tonumber(arg()), arg(), arg()
if redis.call('GET', fence) ~= given then return {'ok', 0} end
if for_ms > 0 then
  redis.call('SET', lease, given .. ':' .. owner, 'PX', for_ms)
  redis.call('PEXPIRE', fence, ttl)
else
  redis.call('DEL', lease)
end
keep_conversation(kept)
return {'ok', 1}
"""
)

WATCH = Script(
    """
redis.call('ZADD', KEYS[1], clock() + tonumber(ARGV[1]), ARGV[2])
return {'ok'}
"""
)

LAPSED = Script(
    """
return {'ok', redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', clock(), 'LIMIT', 0, ARGV[1])}
""",
    is_read=True,
)

CLAIM = Script(
    """
local was = redis.call('HMGET', KEYS[1], 'digest', 'response')
if was[1] then
  if was[1] ~= ARGV[1] then return {'reused'} end
  if was[2] == ARGV[2] and ARGV[4] == 'more' and redis.call('PTTL', KEYS[1]) < tonumber(ARGV[3]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
  end
  return {'ok', was[2]}
end
redis.call('HSET', KEYS[1], 'digest', ARGV[1], 'response', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return {'ok', ARGV[2]}
"""
)

UNCLAIM = Script(
    """
if redis.call('HGET', KEYS[1], 'response') == ARGV[1] then redis.call('DEL', KEYS[1]) end
return {'ok'}
"""
)

COUNT = Script(
    """
local counter, once = unpack(KEYS)
if redis.call('EXISTS', once) == 1 then return {'ok', tonumber(redis.call('GET', counter) or 0)} end
redis.call('SET', once, '', 'PX', ARGV[2])
local value = redis.call('INCRBY', counter, ARGV[1])
redis.call('PEXPIRE', counter, ARGV[2])
return {'ok', value}
"""
)

# Write that changes nothing, because XX requires a key that never exists.
TRY = Script(
    """
redis.call('SET', KEYS[1], '', 'XX')
return {'ok'}
"""
)


class RedisLeases:
    """Part of the Redis store for leases, background runs, keys, secrets and counters."""

    _link: Link
    _retention: Retention

    async def acquire(
        self, tenant: str, anchor: str, owner: str, for_s: float, *, force: bool = False, reserve_s: float = 0.0
    ) -> Lease | None:
        held_s = for_s + reserve_s
        ttl = milliseconds(held_s + self._retention.response_s)
        kept = milliseconds(self._retention.conversation_s)
        args: Args = [owner, milliseconds(held_s), int(force), ttl, round(reserve_s * 1000), kept]
        named = [*keys.lease(tenant, anchor), *keys.conversation(tenant, anchor)]
        number = await self._link.act(ACQUIRE, named, args)
        return Lease(tenant, anchor, owner, number, reserve_s) if number else None

    async def renew(self, lease: Lease, for_s: float) -> bool:
        renewed = await self._extend(lease, milliseconds(for_s + lease.reserve_s))
        response = lease.owner.rpartition(":")[2]
        if renewed and lease.reserve_s and response != lease.anchor:
            # Without this pointer, readers do not find the running response in its conversation.
            kept = milliseconds(self._retention.response_s)
            await self._link.write(("PEXPIRE", keys.anchor(lease.tenant, response), kept))
        return renewed

    async def release(self, lease: Lease) -> None:
        await self._extend(lease, 0)

    async def _extend(self, lease: Lease, for_ms: int) -> bool:
        ttl = for_ms + milliseconds(self._retention.response_s)
        args: Args = [lease.owner, str(lease.fence), for_ms, ttl, milliseconds(self._retention.conversation_s)]
        named = [*keys.lease(lease.tenant, lease.anchor), *keys.conversation(lease.tenant, lease.anchor)]
        return bool(await self._link.act(EXTEND, named, args))

    async def watch(self, run: BackgroundRun, for_s: float) -> None:
        await self._link.act(WATCH, [keys.RUNS], [milliseconds(for_s), _member(run)])

    async def unwatch(self, run: BackgroundRun) -> None:
        await self._link.write(("ZREM", keys.RUNS, _member(run)))

    async def lapsed(self, limit: int = 16) -> tuple[BackgroundRun, ...]:
        found = await self._link.act(LAPSED, [keys.RUNS], [limit])
        return tuple(BackgroundRun(*orjson.loads(member)) for member in found)

    async def claim(self, tenant: str, key: str, digest: str, response: str, *, for_s: float | None = None) -> str:
        kept_s = self._retention.key_s if for_s is None else for_s
        args: Args = [digest, response, milliseconds(kept_s), "" if for_s is None else "more"]
        owner: bytes = await self._link.act(CLAIM, [keys.once(tenant, key)], args)
        return owner.decode()

    async def unclaim(self, tenant: str, key: str, response: str) -> None:
        await self._link.act(UNCLAIM, [keys.once(tenant, key)], [response])

    async def secret(self, name: str, candidate: bytes) -> bytes:
        await self._link.write(("SET", keys.secret(name), candidate, "NX"))
        (made,) = await self._link.read(("GET", keys.secret(name)))
        return bytes(made)

    async def count(self, tenant: str, name: str, amount: int, *, once: str, for_s: float) -> int:
        named = keys.counter(tenant, name, once)
        return int(await self._link.act(COUNT, named, [amount, milliseconds(for_s)]))


def _member(run: BackgroundRun) -> bytes:
    return orjson.dumps([run.tenant, run.response])
