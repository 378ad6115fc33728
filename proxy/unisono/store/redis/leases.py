"""Leases, background runs, idempotency keys, secrets and counters on Redis."""

from __future__ import annotations

import orjson

from unisono.core.state_store import BackgroundRun, Lease, Retention
from unisono.store.redis import keys, lease_scripts
from unisono.store.redis.connection import Link
from unisono.store.redis.script import Args, milliseconds


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
        number = await self._link.act(lease_scripts.ACQUIRE, named, args)
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
        return bool(await self._link.act(lease_scripts.EXTEND, named, args))

    async def watch(self, run: BackgroundRun, for_s: float) -> None:
        await self._link.act(lease_scripts.WATCH, [keys.RUNS], [milliseconds(for_s), _member(run)])

    async def unwatch(self, run: BackgroundRun) -> None:
        await self._link.write(("ZREM", keys.RUNS, _member(run)))

    async def lapsed(self, limit: int = 16) -> tuple[BackgroundRun, ...]:
        found = await self._link.act(lease_scripts.LAPSED, [keys.RUNS], [limit])
        return tuple(BackgroundRun(*orjson.loads(member)) for member in found)

    async def claim(self, tenant: str, key: str, digest: str, response: str, *, for_s: float | None = None) -> str:
        kept_s = self._retention.key_s if for_s is None else for_s
        args: Args = [digest, response, milliseconds(kept_s), "" if for_s is None else "more"]
        owner: bytes = await self._link.act(lease_scripts.CLAIM, [keys.once(tenant, key)], args)
        return owner.decode()

    async def unclaim(self, tenant: str, key: str, response: str) -> None:
        await self._link.act(lease_scripts.UNCLAIM, [keys.once(tenant, key)], [response])

    async def secret(self, name: str, candidate: bytes) -> bytes:
        await self._link.write(("SET", keys.secret(name), candidate, "NX"))
        (made,) = await self._link.read(("GET", keys.secret(name)))
        return bytes(made)

    async def count(self, tenant: str, name: str, amount: int, *, once: str, for_s: float) -> int:
        named = keys.counter(tenant, name, once)
        return int(await self._link.act(lease_scripts.COUNT, named, [amount, milliseconds(for_s)]))


def _member(run: BackgroundRun) -> bytes:
    return orjson.dumps([run.tenant, run.response])
