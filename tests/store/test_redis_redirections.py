"""Tests of redirected writes in a cluster: each runs on one node, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from redis.crc import key_slot

from tests.contract.servers import SLOTS
from tests.listening import Listener
from tests.store.test_redis_former_primary import encode
from unisono.errors import StoreUnavailable
from unisono.store.redis.connection import Link
from unisono.store.redis.script import Script

REPLICA = [b"127.0.0.1", b"1", b"0"]


class RedirectingNode:
    """Scripted cluster node that answers writes with `redirections` first, and counts those that it runs.

    A redirection is the text of an error, with `PORT` for the port of the other node. CLUSTER SLOTS names `primaries`.
    """

    def __init__(self, *redirections: str, replicas: int = 0, runs_only_asked: bool = False) -> None:
        self.redirections = list(redirections)
        self.replicas = replicas
        self.runs_only_asked = runs_only_asked
        self.other: RedirectingNode | None = None
        self.primaries: list[RedirectingNode] = [self]
        self.names: list[str] = []
        self.runs = 0
        self.listener = Listener(self._serve)

    @property
    def port(self) -> int:
        return self.listener.port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_asking = False
        while line := await reader.readline():
            words = []
            for _ in range(int(line[1:])):
                size = int((await reader.readline())[1:])
                words.append((await reader.readexactly(size + 2))[:-2])
            name = words[0].upper().decode()
            self.names.append(name)
            writer.write(self._write(is_asking) if name in {"EVAL", "EVALSHA", "SET"} else encode(self._reply(name)))
            is_asking = name == "ASKING"
            await writer.drain()

    def _write(self, is_asking: bool) -> bytes:
        if self.redirections:
            port = 1 if self.other is None else self.other.port
            return b"-%b\r\n" % self.redirections.pop(0).replace("PORT", str(port)).encode()
        assert is_asking or not self.runs_only_asked
        self.runs += 1
        return encode([b"ok"])

    def _reply(self, name: str) -> Any:
        match name:
            case "HELLO":
                return {b"server": b"redis", b"version": b"7.0.0", b"proto": 3, b"role": b"master"}
            case "CLUSTER":
                size = SLOTS // len(self.primaries)
                ranges = enumerate(self.primaries)
                return [
                    [at * size, (at + 1) * size - 1, [b"127.0.0.1", node.port, b"%040d" % at]] for at, node in ranges
                ]
            case "COMMAND":
                return [[b"evalsha", -3, [b"noscript"], 0, 0, 0, [], [], [], []]]
            case "ROLE":
                return [b"master", 0, [REPLICA] * self.replicas]
            case "WAIT":
                return self.replicas
        return b"OK"


@asynccontextmanager
async def link_on(
    first: RedirectingNode, other: RedirectingNode, replicas: int | None = None, *, knows_other: bool = False
) -> AsyncIterator[Link]:
    async with AsyncExitStack() as stack:
        for node in (first, other):
            await node.listener.start()
            stack.push_async_callback(node.listener.aclose)
        first.other = other
        if knows_other:
            first.primaries = [first, other] if SLOT < SLOTS // 2 else [other, first]
        link = Link(f"redis+cluster://127.0.0.1:{first.port}", 5.0, replicas)
        stack.push_async_callback(link.aclose)
        yield link


KEY = "key"
SLOT = key_slot(KEY.encode())
MOVED = f"MOVED {SLOT} 127.0.0.1:PORT"
COUNT = Script("return {'ok'}")


async def test_a_write_redirected_to_an_unknown_primary_runs_once() -> None:
    first, other = RedirectingNode(MOVED), RedirectingNode(replicas=1)
    async with link_on(first, other) as link:
        await link.act(COUNT, [KEY], [])
    assert (first.runs, other.runs) == (0, 1)
    # Its replicas are checked on the connection of the write.
    assert other.names[-3:] == ["EVAL", "WAIT", "ROLE"]


async def test_an_unknown_primary_without_replicas_acknowledges_no_write() -> None:
    first, other = RedirectingNode(MOVED), RedirectingNode()
    async with link_on(first, other) as link:
        with pytest.raises(StoreUnavailable, match="replicas"):
            await link.act(COUNT, [KEY], [])
    assert (first.runs, other.runs) == (0, 1)


async def test_a_redirected_write_without_replicas_runs_once() -> None:
    first, other = RedirectingNode(MOVED), RedirectingNode()
    async with link_on(first, other, 0) as link:
        await link.act(COUNT, [KEY], [])
    assert (first.runs, other.runs) == (0, 1)
    assert "WAIT" not in other.names


@pytest.mark.parametrize("count", [0, 1], ids=["no replica", "replica"])
async def test_a_write_to_a_slot_that_is_being_moved_runs_on_the_new_node(count: int) -> None:
    first, other = RedirectingNode(f"ASK {SLOT} 127.0.0.1:PORT"), RedirectingNode(replicas=count, runs_only_asked=True)
    async with link_on(first, other, count, knows_other=True) as link:
        await link.act(COUNT, [KEY], [])
    assert (first.runs, other.runs) == (0, 1)


async def test_a_write_whose_keys_are_on_two_nodes_is_repeated() -> None:
    first = RedirectingNode("TRYAGAIN Multiple keys request during rehashing of slot")
    async with link_on(first, RedirectingNode(), 0) as link:
        await link.act(COUNT, [KEY], [])
    assert first.runs == 1


async def test_only_the_redirected_write_of_a_batch_is_sent_again() -> None:
    first, other = RedirectingNode(MOVED), RedirectingNode()
    second_key = next(
        key for key in map(str, range(99)) if (key_slot(key.encode()) < SLOTS // 2) == (SLOT < SLOTS // 2)
    )
    async with link_on(first, other, knows_other=True) as link:
        await link.write(("SET", KEY, "1"), ("SET", second_key, "1"))
    assert (first.runs, other.runs) == (1, 1)


async def test_endless_redirections_of_a_write_are_an_error() -> None:
    first, other = RedirectingNode(*[MOVED] * 99), RedirectingNode()
    async with link_on(first, other) as link:
        first.other = first
        with pytest.raises(StoreUnavailable, match="redirected"):
            await link.act(COUNT, [KEY], [])
    assert (first.runs, other.runs) == (0, 0)
