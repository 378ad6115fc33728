"""Writes to a cluster whose slots move, whose connections end or whose nodes stall between two steps of one write."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from redis.crc import key_slot

from tests.contract.servers import CLUSTERED, SLOTS, Server, agreed, attach, cluster, end, move_slot
from tests.contract.state import response
from unisono.core.state_store import Retention, StoredResponse
from unisono.errors import StoreUnavailable
from unisono.store.redis import RedisStore, keys, scripts

pytestmark = [pytest.mark.alone, pytest.mark.slow]

DEADLINE_S = 3.0


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Server]]:
    made = cluster(tmp_path)
    for node in made:
        with node.client() as client:
            client.script_load(scripts.SAVE.text)
    try:
        yield made
    finally:
        for node in made:
            if node.process is not None:
                node.signal(signal.SIGCONT)
        end(made)


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "replica", (*CLUSTERED, "repl-diskless-sync-delay 0"))
    try:
        yield made
    finally:
        if made.process is not None:
            made.signal(signal.SIGCONT)
        made.end()


def opened(node: Server, replicas: int | None) -> RedisStore:
    url = f"redis+cluster://127.0.0.1:{node.port}"
    return RedisStore(url, Retention(), deadline_s=DEADLINE_S, replicas=replicas)


def of_node(number: int) -> StoredResponse:
    """A response without items in the slots of a node."""
    of_it = range(SLOTS * number // 3, SLOTS * (number + 1) // 3)
    return next(one for one in iter(lambda: response(input=()), None) if slot_of(one) in of_it)


def empty(node: Server) -> None:
    """A slot with keys cannot be given away at once."""
    with node.client() as client:
        client.flushall()


def slot_of(one: StoredResponse) -> int:
    return key_slot(keys.response("ann", one.id, one.id)[0].encode())


async def test_a_write_after_another_node_failed_waits_for_the_replica_of_its_own_node(
    nodes: list[Server], replica: Server
) -> None:
    """The failure has the client read the slots again, which must not part a write from its WAIT."""
    copied, alone, other = nodes
    store = opened(copied, 1)
    one = of_node(0)
    try:
        await asyncio.to_thread(attach, replica, copied, nodes)
        await store.create("ann", one)
        with suppress(StoreUnavailable):
            await store.create("ann", of_node(2))
        empty(copied)
        move_slot(slot_of(one), nodes, alone)
        with other.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(StoreUnavailable):
            await store.create("ann", of_node(2))
        with pytest.raises(StoreUnavailable, match="replicas"):
            await store.create("ann", one)
    finally:
        await store.aclose()


async def test_by_default_a_redirected_write_waits_for_the_replica_of_its_new_node(
    nodes: list[Server], replica: Server
) -> None:
    alone, copied = nodes[0], nodes[1]
    store = opened(alone, None)
    one = of_node(0)
    try:
        await asyncio.to_thread(attach, replica, copied, nodes)
        assert await store.start() == ()
        await store.create("ann", one)
        empty(alone)
        move_slot(slot_of(one), nodes, copied)
        replica.signal(signal.SIGSTOP)
        with pytest.raises(StoreUnavailable, match="replicas"):
            await store.create("ann", one)
    finally:
        await store.aclose()


async def test_by_default_a_write_waits_for_its_replica_before_all_nodes_were_seen(
    nodes: list[Server], replica: Server
) -> None:
    copied, stalled = nodes[0], nodes[2]
    store = opened(copied, None)
    try:
        await asyncio.to_thread(attach, replica, copied, nodes)
        stalled.signal(signal.SIGSTOP)
        with pytest.raises(StoreUnavailable):
            await store.start()
        stalled.signal(signal.SIGCONT)
        async with asyncio.timeout(20):
            while not all(agreed(node, 4) for node in nodes):
                await asyncio.sleep(0.05)
        replica.signal(signal.SIGSTOP)
        with pytest.raises(StoreUnavailable, match="replicas"):
            await store.create("ann", of_node(0))
    finally:
        await store.aclose()


async def test_by_default_a_store_that_was_not_started_waits_for_a_replica(
    nodes: list[Server], replica: Server
) -> None:
    copied = nodes[0]
    store = opened(copied, None)
    try:
        await asyncio.to_thread(attach, replica, copied, nodes)
        replica.signal(signal.SIGSTOP)
        with pytest.raises(StoreUnavailable, match="replicas"):
            await store.create("ann", of_node(0))
        # A node without a replica takes writes at once.
        await store.create("ann", of_node(1))
    finally:
        await store.aclose()


async def test_a_repeated_write_waits_for_the_copy_of_the_first(nodes: list[Server], replica: Server) -> None:
    """The script finds the write done and writes nothing: what is acknowledged is the first one."""
    copied = nodes[0]
    store = opened(copied, 1)
    one = of_node(0)
    try:
        await asyncio.to_thread(attach, replica, copied, nodes)
        await store.create("ann", of_node(0))
        replica.signal(signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="replicas"):
                await store.create("ann", one)
        replica.signal(signal.SIGCONT)
        await store.create("ann", one)
    finally:
        await store.aclose()


async def test_a_connection_that_ends_between_a_write_and_its_wait_acknowledges_nothing(
    nodes: list[Server], replica: Server
) -> None:
    copied = nodes[0]
    store = opened(copied, 1)
    try:
        await asyncio.to_thread(attach, replica, copied, nodes)
        await store.create("ann", of_node(0))
        replica.signal(signal.SIGSTOP)
        sending = asyncio.create_task(store.create("ann", of_node(0)))
        with copied.client() as client:
            async with asyncio.timeout(DEADLINE_S):
                while int(client.info("clients")["blocked_clients"]) == 0:
                    await asyncio.sleep(0.01)
            client.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(StoreUnavailable):
            await sending
        replica.signal(signal.SIGCONT)
        await store.create("ann", of_node(0))
    finally:
        await store.aclose()
