"""Recordings of answers in Redis, with one hash slot per tenant.

One hash slot allows a write to delete the oldest recordings as well. Each recording has its own expiry time. The next
write of the tenant deletes expired recordings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Final

import orjson

from unisono.core.recordings import StoredTrace
from unisono.store.redis import keys
from unisono.store.redis.connection import Link
from unisono.store.redis.script import Args, Script, milliseconds

# Maximum bytes of documents that share a write. A larger document has its own write, with the full deadline.
WRITE_BYTES: Final = 256 * 1024

KEEP_TRACES = Script(
    """
local order, ends, about, documents = unpack(KEYS)
local for_ms, most = tonumber(arg()), tonumber(arg())
local now = clock()
local function forget(gone)
  for _, one in ipairs(gone) do
    redis.call('ZREM', order, one)
    redis.call('ZREM', ends, one)
    redis.call('HDEL', about, one)
    redis.call('HDEL', documents, one)
  end
end
forget(redis.call('ZRANGEBYSCORE', ends, '-inf', now))
local last = redis.call('ZREVRANGE', order, 0, 0, 'WITHSCORES')
local place = last[2] and tonumber(last[2]) or 0
for n = next_arg, #ARGV, 3 do
  local id = ARGV[n]
  place = place + 1
  redis.call('ZADD', order, place, id)
  redis.call('ZADD', ends, now + for_ms, id)
  redis.call('HSET', about, id, ARGV[n + 1])
  redis.call('HSET', documents, id, ARGV[n + 2])
end
forget(redis.call('ZRANGE', order, 0, -(most + 1)))
local longest = redis.call('ZREVRANGE', ends, 0, 0, 'WITHSCORES')
for _, key in ipairs(KEYS) do redis.call('PEXPIREAT', key, longest[2]) end
return {'ok'}
"""
)

READ_TRACE = Script(
    """
local _, ends, about, documents = unpack(KEYS)
local id = arg()
local there = redis.call('ZSCORE', ends, id)
if not there or tonumber(there) <= clock() then return {'ok'} end
return {'ok', {redis.call('HGET', about, id), redis.call('HGET', documents, id)}}
""",
    is_read=True,
)

LIST_TRACES = Script(
    """
local order, ends, about = unpack(KEYS)
local limit, now, found = tonumber(arg()), clock(), {}
for _, id in ipairs(redis.call('ZREVRANGE', order, 0, -1)) do
  if #found >= 2 * limit then break end
  if tonumber(redis.call('ZSCORE', ends, id)) > now then
    found[#found + 1] = id
    found[#found + 1] = redis.call('HGET', about, id)
  end
end
return {'ok', found}
""",
    is_read=True,
)


class RedisTraces:
    """Part of the Redis store for recordings of answers, limited in number per tenant."""

    _link: Link

    async def keep_traces(self, *traces: StoredTrace, for_s: float, most: int) -> None:
        # One write per tenant: its failure does not affect other tenants, and recordings of one tenant keep their
        # order.
        of_tenant: dict[str, list[StoredTrace]] = {}
        for one in traces:
            of_tenant.setdefault(one.tenant, []).append(one)
        await asyncio.gather(*(self._write(those, for_s, most) for those in of_tenant.values()))

    async def _write(self, traces: list[StoredTrace], for_s: float, most: int) -> None:
        for together in _write_groups(traces):
            args: Args = [milliseconds(for_s), most]
            for one in together:
                args += [_name(one.id), orjson.dumps(one.at) + b" " + one.about, one.document]
            await self._link.act(KEEP_TRACES, keys.traces(together[0].tenant), args)

    async def trace(self, tenant: str, id: str) -> StoredTrace | None:
        found = await self._link.act(READ_TRACE, keys.traces(tenant), [_name(id)])
        if found is None:
            return None
        at, _, about = bytes(found[0]).partition(b" ")
        return StoredTrace(tenant, id, float(at), about, bytes(found[1]))

    async def traces(self, tenant: str, limit: int = 20) -> tuple[StoredTrace, ...]:
        found = await self._link.act(LIST_TRACES, keys.traces(tenant), [limit])
        traces = []
        for id, head in zip(found[::2], found[1::2], strict=True):
            at, _, about = bytes(head).partition(b" ")
            traces.append(StoredTrace(tenant, bytes(id).decode("utf-8", "surrogatepass"), float(at), about))
        return tuple(traces)


def _write_groups(traces: Iterable[StoredTrace]) -> Iterator[list[StoredTrace]]:
    """Yield the recordings in their order, in groups that each fit one write."""
    together: list[StoredTrace] = []
    size = 0
    for one in traces:
        if together and size + len(one.document) > WRITE_BYTES:
            yield together
            together, size = [], 0
        together.append(one)
        size += len(one.document)
    if together:
        yield together


def _name(id: str) -> bytes:
    return id.encode("utf-8", "surrogatepass")
