"""Lookup of the primary on which sentinels or cluster nodes agree, and of its replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from redis.asyncio.cluster import ClusterNode, RedisCluster

from unisono.errors import StoreUnavailable


async def majority_address(queries: Sequence[Awaitable[Any]], within_s: float) -> tuple[str, int]:
    """Return the address that more than half of the queries report.

    No query may report a different address. Raises `StoreUnavailable` if there is no such address after `within_s`
    seconds.
    """
    tasks = [asyncio.ensure_future(one) for one in queries]
    try:
        await asyncio.wait(tasks, timeout=within_s)
    finally:
        for task in tasks:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    found = [tuple(answer) for answer in answers if isinstance(answer, tuple | list)]
    if len(set(found)) > 1:
        raise StoreUnavailable("a failover of the store is in progress; try again")
    if 2 * len(found) <= len(answers):
        raise StoreUnavailable(
            f"no majority of the store's servers named the primary within {within_s:g} s; "
            "try again, check the servers, or raise `store.deadline_s`"
        )
    host, port = found[0]
    return text(host), int(port)


async def primary_seen_by(client: RedisCluster, node: ClusterNode, key: str) -> tuple[str, int] | None:
    """Return the address of the primary of `key` as one cluster node knows it."""
    slot = client.keyslot(key)
    seen: Any = await client.cluster_slots(target_nodes=node)
    for (first, last), servers in seen.items():
        if first <= slot <= last:
            host, port = servers["primary"]
            # The host is empty if the node does not know its own address.
            return text(host) or node.host, int(port)
    return None


def replicas_in(role: Any) -> int:
    """Return the number of connected replicas in an answer to ROLE.

    0 for an error and for a server that is not a primary.
    """
    return len(role[2]) if isinstance(role, list) and role[0] in (b"master", "master") else 0


def text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
