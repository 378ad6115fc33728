"""Tests of a cluster node that has not noticed a failover.

Its reply alone does not prove that a log is complete.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, NodesManager, RedisCluster
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.sentinel import Sentinel

from tests.contract.servers import SLOTS
from tests.listening import Listener
from unisono.core.state_store import Lease, Retention
from unisono.errors import StoreUnavailable
from unisono.store.redis import RedisStore

LEASE = Lease("ann", "resp_1", "owner", 1)
FORMER, PROMOTED = "a" * 40, "b" * 40


class Node:
    """Scripted cluster node.

    `primary` is the index of the node that it considers the primary of all slots.
    """

    def __init__(self, primary: int, history: str) -> None:
        self.primary = primary
        self.history = history
        self.nodes: list[Node] = []
        self.port = 0
        self.listener = Listener(self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replies: dict[bytes, Callable[[], Any]] = {
            b"HELLO": lambda: {b"server": b"redis", b"version": b"7.0.0", b"proto": 3, b"role": b"master"},
            b"CLUSTER": self._slots,
            b"COMMAND": lambda: [[b"evalsha", -3, [b"noscript"], 0, 0, 0, [], [], [], []]],
            b"EVAL": lambda: [b"ok", [1, self.history.encode()]],
            b"EVALSHA": lambda: [b"ok", [1, self.history.encode()]],
            b"INFO": lambda: f"# Replication\r\nrole:master\r\nmaster_replid:{self.history}\r\n".encode(),
        }
        while line := await reader.readline():
            words = []
            for _ in range(int(line[1:])):
                size = int((await reader.readline())[1:])
                words.append((await reader.readexactly(size + 2))[:-2])
            reply = replies.get(words[0].upper(), lambda: b"OK")()
            writer.write(encode(reply))
            await writer.drain()

    def _slots(self) -> Any:
        primary = self.nodes[self.primary]
        others = [node for node in self.nodes if node is not primary]
        return [[0, SLOTS - 1, *([b"127.0.0.1", node.port, b"%040d" % 0] for node in (primary, *others))]]


def encode(reply: Any) -> bytes:
    match reply:
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case dict():
            parts = [encode(part) for item in reply.items() for part in item]
            return b"%%%d\r\n%b" % (len(reply), b"".join(parts))
        case _:
            return b"*%d\r\n%b" % (len(reply), b"".join(map(encode, reply)))


@asynccontextmanager
async def store_on(*nodes: Node) -> AsyncIterator[RedisStore]:
    async with AsyncExitStack() as stack:
        for node in nodes:
            node.nodes = list(nodes)
            await node.listener.start()
            node.port = node.listener.port
            stack.push_async_callback(node.listener.aclose)
        store = RedisStore(f"redis+cluster://127.0.0.1:{nodes[0].port}", Retention(), deadline_s=5.0, replicas=0)
        stack.push_async_callback(store.aclose)
        yield store


async def test_log_check_fails_if_the_nodes_disagree_on_the_primary() -> None:
    async with store_on(Node(0, FORMER), Node(1, PROMOTED), Node(1, PROMOTED)) as store:
        for _ in range(12):
            with pytest.raises(StoreUnavailable, match="failover"):
                await store.is_log_complete(LEASE, "resp_1")


async def test_log_is_complete_if_the_nodes_agree() -> None:
    async with store_on(Node(0, FORMER), Node(0, FORMER), Node(0, FORMER)) as store:
        assert await store.is_log_complete(LEASE, "resp_1") is True


async def test_unreachable_minority_of_nodes_is_tolerated() -> None:
    nodes = [Node(0, FORMER), Node(0, FORMER), Node(0, FORMER)]
    async with store_on(*nodes) as store:
        assert await store.is_log_complete(LEASE, "resp_1") is True
        await nodes[2].listener.aclose()
        assert await store.is_log_complete(LEASE, "resp_1") is True
        await nodes[1].listener.aclose()
        # Nothing shows that a failover is in progress.
        with pytest.raises(StoreUnavailable, match="no majority"):
            await store.is_log_complete(LEASE, "resp_1")


# Methods with which the connection follows redirections, rereads slots and sends commands. The library hardly documents
# them.
LIBRARY_METHODS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "initialize": (RedisCluster.initialize, ()),
    "nodes_manager.initialize": (NodesManager.initialize, ("last_failed_node_name",)),
    "nodes_manager.move_slot": (NodesManager.move_slot, ("e",)),
    "nodes_manager.aclose": (NodesManager.aclose, ("attr",)),
    "get_node_from_key": (RedisCluster.get_node_from_key, ("key",)),
    "get_nodes": (RedisCluster.get_nodes, ()),
    "get_primaries": (RedisCluster.get_primaries, ()),
    "keyslot": (RedisCluster.keyslot, ("key",)),
    "cluster_slots": (RedisCluster.cluster_slots, ("target_nodes",)),
    "ClusterNode": (ClusterNode.__init__, ("host", "port")),
    "parse_response": (Redis.parse_response, ("connection", "command_name")),
    "get_available_connection": (ConnectionPool.get_available_connection, ()),
    "ensure_connection": (ConnectionPool.ensure_connection, ("connection",)),
    "can_read": (AbstractConnection.can_read, ()),
    "check_master_state": (Sentinel.check_master_state, ("state", "service_name")),
    "send_packed_command": (AbstractConnection.send_packed_command, ("command",)),
}


@pytest.mark.parametrize(("method", "parameters"), LIBRARY_METHODS.values(), ids=LIBRARY_METHODS)
def test_redis_library_has_the_methods_that_are_used(method: Callable[..., Any], parameters: tuple[str, ...]) -> None:
    assert set(parameters) <= set(inspect.signature(method).parameters)
