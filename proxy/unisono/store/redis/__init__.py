"""Shared store: Redis 6.2+ or Valkey, standalone, with Sentinel, or as a cluster.

Replicas of the gateway need to share nothing but this store. Each operation has a short deadline. The store does not
repeat operations. Callers may repeat them, because each write of a record is one idempotent script on one hash slot.
Pointers (the location of an item, the conversation of a response) are written after their targets, and before the write
is acknowledged.
"""

from __future__ import annotations

from unisono.core.state_store import Retention, StoredResponse
from unisono.store.codec import StateLimits
from unisono.store.event_wait import Waiting
from unisono.store.redis import keys
from unisono.store.redis.access import KeptKeys
from unisono.store.redis.accounts import RedisAccounts
from unisono.store.redis.connection import Link
from unisono.store.redis.conversations import RedisConversations
from unisono.store.redis.leases import TRY, RedisLeases
from unisono.store.redis.pubsub import Listener
from unisono.store.redis.request_records import RedisRequests
from unisono.store.redis.responses import RedisResponses, encoded
from unisono.store.redis.server_checks import check_servers
from unisono.store.redis.traces import RedisTraces
from unisono.store.write_errors import refusal


class RedisStore(RedisResponses, RedisConversations, RedisLeases, KeptKeys, RedisAccounts, RedisTraces, RedisRequests):
    """Store on a Redis or Valkey server.

    `url` is redis://, rediss://, unix://, redis+sentinel://h1,h2/name[/db] or redis+cluster://h1,h2; `valkey` may
    replace `redis` in the scheme. `deadline_s` limits each operation, in seconds. `replicas` is the number of Redis
    replicas that must acknowledge a write. None means one if the primary has replicas, otherwise zero. Raises
    `ConfigError` for an invalid address.
    """

    def __init__(
        self,
        url: str,
        retention: Retention | None = None,
        bounds: StateLimits | None = None,
        deadline_s: float = 0.25,
        replicas: int | None = None,
    ) -> None:
        self._link = Link(url, deadline_s, replicas)
        self._replicas = replicas
        self._retention = retention or Retention()
        self._bounds = bounds or StateLimits()
        self._waiting = Waiting()
        self._known_accounts = set()
        self._listener = Listener(self._link.pubsub, self._waiting)

    async def start(self) -> tuple[str, ...]:
        await self.check()
        return await check_servers(self._link, self._replicas)

    async def aclose(self) -> None:
        await self._listener.aclose()
        await self._link.aclose()

    async def check(self, beginning: StoredResponse | None = None, tenant: str = "") -> None:
        if beginning is not None:
            _, input, _ = await encoded(beginning, self._bounds)
            await self._check_room(tenant, beginning.conversation, len(input))
        else:
            await self._link.check_replicas()
        # A server that is full, read-only or unable to persist refuses this write like any other. The write is a
        # script, like the other writes, because an access control list may deny scripts.
        await self._link.act(TRY, [keys.NEVER], [])
        if beginning is not None and beginning.ancestors:
            renewals = await self._renewals(tenant, beginning.ancestors)
            if renewals:
                await self._link.write(*renewals)

    async def _check_room(self, tenant: str, conversation: str | None, size: int) -> None:
        if conversation is not None:
            (used,) = await self._link.read(("HGET", keys.conversation(tenant, conversation)[0], "bytes"))
            if int(used or 0) + size > self._bounds.conversation:
                raise refusal("large")
