"""Lookup of the current primary of a key, and of this primary's sequence of writes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.cluster import RedisCluster
from redis.exceptions import NoPermissionError

from unisono.core.frozen import dataclass
from unisono.errors import StoreUnavailable
from unisono.store.redis.clients import RedisClients, epoch_in, text


@dataclass(frozen=True, slots=True)
class WriteHistory:
    """Identity of the sequence of writes that a primary continues.

    `id` is the replication id; it is empty if the server does not permit INFO. `epoch` is the configuration epoch of
    the sentinels; it is empty without sentinels. The id alone is not unique under Sentinel: a former primary that is
    named again before it was demoted keeps its id, but lacks the writes that the other server accepted meanwhile.
    """

    id: str
    epoch: str


async def read_history(server: RedisClients, key: str, within_s: float) -> WriteHistory:
    """Return the history of the primary of `key`, over a new connection.

    With a cluster, the caller must have read the slots. Raises `StoreUnavailable` while sentinels or nodes disagree on
    the primary, or if too few sentinels or nodes answer within `within_s` seconds.
    """
    primary, epoch = await _find_primary(server, key, within_s)
    async with primary:
        try:
            found = await primary.info("replication")
        except NoPermissionError:
            return WriteHistory("", epoch)
    return WriteHistory(str(found["master_replid"]), epoch)


async def _find_primary(server: RedisClients, key: str, within_s: float) -> tuple[Redis, str]:
    if server.sentinel is not None:
        calls = [_primary_named_by(sentinel, server.service) for sentinel in server.sentinel.sentinels]
    elif isinstance(server.client, RedisCluster):
        # All nodes are queried, because a node that was isolated or stalled does not know of a failover yet.
        calls = [_primary_seen_by(server.client, node, key) for node in server.client.get_nodes()]
    else:
        return Redis.from_url(server.url, **server.options), ""
    host, port, epoch = await _majority(calls, within_s)
    return Redis(host=host, port=port, **server.options), epoch


async def _majority(queries: Sequence[Awaitable[Any]], within_s: float) -> tuple[str, int, str]:
    """Return the address and epoch of the primary that more than half of the queries report.

    Raises `StoreUnavailable` if two queries report different primaries, or if too few queries have succeeded after
    `within_s` seconds.
    """
    tasks = [asyncio.ensure_future(one) for one in queries]
    try:
        await asyncio.wait(tasks, timeout=within_s)
    finally:
        for task in tasks:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    found = [answer for answer in answers if isinstance(answer, tuple)]
    if len(set(found)) > 1:
        raise StoreUnavailable("a failover of the store is in progress; try again")
    if 2 * len(found) <= len(answers):
        raise StoreUnavailable(
            f"no majority of the store's servers agreed on the primary within {within_s:g} s; "
            "try again, check the servers, or raise `store.deadline_s`"
        )
    return found[0]


async def _primary_named_by(sentinel: Redis, service: str) -> tuple[str, int, str] | None:
    primaries: Any = await sentinel.sentinel_masters()
    state = primaries.get(service)
    return None if state is None else (text(state["ip"]), int(state["port"]), epoch_in(state))


async def _primary_seen_by(client: RedisCluster, node: Any, key: str) -> tuple[str, int, str] | None:
    """Return the address of the primary of `key` according to one cluster node.

    None if this node knows no primary for the key. No epoch is needed, because a cluster promotes only replicas, and a
    replica that is promoted gets a new replication id.
    """
    slot = client.keyslot(key)
    seen: Any = await client.cluster_slots(target_nodes=node)
    for (first, last), servers in seen.items():
        if first <= slot <= last:
            host, port = servers["primary"]
            # The host is empty if the node does not know its own address.
            return text(host) or node.host, int(port), ""
    return None
