"""Tests of cluster writes during which slots move, connections end or nodes stall."""

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
from unisono.store.redis import RedisStore, keys, response_scripts

pytestmark = [pytest.mark.alone, pytest.mark.slow]

DEADLINE_S = 3.0


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Server]]:
    servers = cluster(tmp_path)
    for node in servers:
        with node.client() as client:
            client.script_load(response_scripts.SAVE.text)
    try:
        yield servers
    finally:
        for node in servers:
            if node.process is not None:
                node.signal(signal.SIGCONT)
        end(servers)


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "replica", (*CLUSTERED, "repl-diskless-sync-delay 0"))
    try:
        yield server
    finally:
        if server.process is not None:
            server.signal(signal.SIGCONT)
        server.end()


def opened(node: Server, replicas: int | None) -> RedisStore:
    url = f"redis+cluster://127.0.0.1:{node.port}"
    return RedisStore(url, Retention(), deadline_s=DEADLINE_S, replicas=replicas)


def response_on(number: int) -> StoredResponse:
    """Return a response without items in the slots of a node."""
    slots = range(SLOTS * number // 3, SLOTS * (number + 1) // 3)
    return next(stored for stored in iter(lambda: response(input=()), None) if slot_of(stored) in slots)


def empty(node: Server) -> None:
    """Delete all keys of a node; a slot that contains keys cannot be moved at once."""
    with node.client() as client:
        client.flushall()


def slot_of(stored: StoredResponse) -> int:
    return key_slot(keys.response("ann", stored.id, stored.id)[0].encode())


async def test_write_after_the_failure_of_another_node_waits_for_its_replica(
    nodes: list[Server], replica: Server
) -> None:
    """Write after a failure that makes the client read the slots again.

    This must not separate a write from its WAIT.
    """
    replicated, unreplicated, other = nodes
    store = opened(replicated, 1)
    stored = response_on(0)
    try:
        await asyncio.to_thread(attach, replica, replicated, nodes)
        await store.create("ann", stored)
        with suppress(StoreUnavailable):
            await store.create("ann", response_on(2))
        empty(replicated)
        move_slot(slot_of(stored), nodes, unreplicated)
        with other.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(StoreUnavailable):
            await store.create("ann", response_on(2))
        with pytest.raises(StoreUnavailable, match="replicas"):
            await store.create("ann", stored)
    finally:
        await store.aclose()


async def test_redirected_write_waits_for_the_replica_of_the_new_node(nodes: list[Server], replica: Server) -> None:
    unreplicated, replicated = nodes[0], nodes[1]
    store = opened(unreplicated, None)
    stored = response_on(0)
    try:
        await asyncio.to_thread(attach, replica, replicated, nodes)
        assert await store.start() == ()
        await store.create("ann", stored)
        empty(unreplicated)
        move_slot(slot_of(stored), nodes, replicated)
        replica.signal(signal.SIGSTOP)
        with pytest.raises(StoreUnavailable, match="replicas"):
            await store.create("ann", stored)
    finally:
        await store.aclose()


async def test_write_waits_for_its_replica_before_all_nodes_are_known(nodes: list[Server], replica: Server) -> None:
    replicated, stalled = nodes[0], nodes[2]
    store = opened(replicated, None)
    try:
        await asyncio.to_thread(attach, replica, replicated, nodes)
        stalled.signal(signal.SIGSTOP)
        with pytest.raises(StoreUnavailable):
            await store.start()
        stalled.signal(signal.SIGCONT)
        async with asyncio.timeout(20):
            while not all(agreed(node, 4) for node in nodes):
                await asyncio.sleep(0.05)
        replica.signal(signal.SIGSTOP)
        with pytest.raises(StoreUnavailable, match="replicas"):
            await store.create("ann", response_on(0))
    finally:
        await store.aclose()


async def test_store_that_was_not_started_waits_for_a_replica(nodes: list[Server], replica: Server) -> None:
    replicated = nodes[0]
    store = opened(replicated, None)
    try:
        await asyncio.to_thread(attach, replica, replicated, nodes)
        replica.signal(signal.SIGSTOP)
        with pytest.raises(StoreUnavailable, match="replicas"):
            await store.create("ann", response_on(0))
        # A node without a replica accepts writes immediately.
        await store.create("ann", response_on(1))
    finally:
        await store.aclose()


async def test_repeated_write_waits_for_replication_of_the_first(nodes: list[Server], replica: Server) -> None:
    """The script finds the write done and changes nothing; the first write is acknowledged."""
    replicated = nodes[0]
    store = opened(replicated, 1)
    stored = response_on(0)
    try:
        await asyncio.to_thread(attach, replica, replicated, nodes)
        await store.create("ann", response_on(0))
        replica.signal(signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="replicas"):
                await store.create("ann", stored)
        replica.signal(signal.SIGCONT)
        await store.create("ann", stored)
    finally:
        await store.aclose()


async def test_disconnect_between_a_write_and_its_wait_is_not_acknowledged(
    nodes: list[Server], replica: Server
) -> None:
    replicated = nodes[0]
    store = opened(replicated, 1)
    try:
        await asyncio.to_thread(attach, replica, replicated, nodes)
        await store.create("ann", response_on(0))
        replica.signal(signal.SIGSTOP)
        write = asyncio.create_task(store.create("ann", response_on(0)))
        with replicated.client() as client:
            async with asyncio.timeout(DEADLINE_S):
                while int(client.info("clients")["blocked_clients"]) == 0:
                    await asyncio.sleep(0.01)
            client.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(StoreUnavailable):
            await write
        replica.signal(signal.SIGCONT)
        await store.create("ann", response_on(0))
    finally:
        await store.aclose()
