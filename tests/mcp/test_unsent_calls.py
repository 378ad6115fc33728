"""Tests of calls that end before anything was sent: they count as not executed."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.fakes.wire import Close, Seen, Step
from tests.mcp.arguments import sent
from tests.mcp.conftest import assert_no_tasks_left
from tests.mcp.hostile import COMPLETE, Hostile, ModernHostile, answer, text
from unisono.core.tool_host import Command, ToolServer, ToolTimeouts, ToolTransport
from unisono.mcp import McpHost


class StalledLookups:
    """Lookups of host names in this process, which wait from `stall` until `release`."""

    def __init__(self, look_up: Callable[..., Any]) -> None:
        self._look_up = look_up
        self._may_go_on = threading.Event()
        self._may_go_on.set()
        self.has_stalled = threading.Event()
        self.stall = self._may_go_on.clear
        self.release = self._may_go_on.set

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self._may_go_on.is_set():
            self.has_stalled.set()
            self._may_go_on.wait(10)
        return self._look_up(*args, **options)

    async def until_stalled(self) -> None:
        assert await asyncio.to_thread(self.has_stalled.wait, 5)


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> Iterator[StalledLookups]:
    lookups = StalledLookups(socket.getaddrinfo)
    monkeypatch.setattr(socket, "getaddrinfo", lookups)
    monkeypatch.setattr("unisono.net.connection_pool.DNS_CACHE_S", 0.0)
    yield lookups
    lookups.release()


class Modern(ModernHostile):
    """Server that closes each connection after one answer, so that the next request needs a new one."""

    def _respond(self, seen: Seen) -> Iterable[Step]:
        return [*super()._respond(seen), Close()]


class Legacy(Hostile):
    """Server like `Modern`, with a protocol version that only the SDK's transport supports."""

    def _respond(self, seen: Seen) -> Iterable[Step]:
        return [*super()._respond(seen), Close()]


SERVERS: dict[str, Callable[[], Hostile]] = {
    "plain exchanges": lambda: Modern(lambda seen: [answer(seen, {**COMPLETE, "content": []})]),
    "transport of the SDK": lambda: Legacy(lambda seen: [text(seen)]),
}


def named(server: ToolServer) -> ToolServer:
    """Return the server under a name that has to be looked up."""
    return replace(server, url=server.url.replace("127.0.0.1", "localhost"))


@pytest.mark.parametrize("make", SERVERS.values(), ids=SERVERS)
async def test_deadline_while_connecting_counts_as_not_executed(
    make: Callable[[], Hostile], host: McpHost, lookups: StalledLookups
) -> None:
    async with make() as hostile:
        server = named(hostile.server(timeouts=ToolTimeouts(call_s=0.3)))
        await host.list_tools(server)
        lookups.stall()
        outcome = await host.call(server, "act", sent({}))
        assert lookups.has_stalled.is_set()
        assert (outcome.is_error, outcome.outcome_unknown) == (True, False), outcome.text
        assert re.fullmatch(
            r"The tool server was not ready within [\d.]+ s; the operator can check the server, or raise its "
            r"`timeout`\.",
            outcome.text,
        )
        lookups.release()
        await asyncio.sleep(0.1)
        assert hostile.calls == []


@pytest.mark.parametrize("make", SERVERS.values(), ids=SERVERS)
async def test_call_that_was_not_sent_when_the_gateway_closes_counts_as_not_executed(
    make: Callable[[], Hostile], lookups: StalledLookups
) -> None:
    host = McpHost()
    async with make() as hostile:
        server = named(hostile.server())
        await host.list_tools(server)
        lookups.stall()
        call = asyncio.create_task(host.call(server, "act", sent({})))
        await lookups.until_stalled()
        await host.aclose()
        outcome = await call
        assert (outcome.is_error, outcome.outcome_unknown) == (True, False), outcome.text
        lookups.release()
        await asyncio.sleep(0.1)
        assert hostile.calls == []
    assert_no_tasks_left()


# Answers the handshake and a list, then reads nothing until its input ends.
DEAF = """
import json, sys, time
for line in sys.stdin:
    request = json.loads(line)
    method, id = request.get("method"), request.get("id")
    if id is None:
        continue
    if method == "initialize":
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                  "serverInfo": {"name": "deaf", "version": "1"}}
    elif method == "tools/list":
        result = {"tools": [{"name": "act", "inputSchema": {"type": "object"}}]}
    else:
        print(json.dumps({"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": "unknown"}}), flush=True)
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": id, "result": result}), flush=True)
    if method == "tools/list":
        time.sleep(60)
"""


async def test_call_behind_a_full_pipe_counts_as_not_executed(host: McpHost) -> None:
    server = ToolServer(
        "deaf",
        command=Command((sys.executable, "-c", DEAF)),
        transport=ToolTransport.STDIO,
        configured=True,
        timeouts=ToolTimeouts(call_s=0.5),
    )
    await host.list_tools(server)
    first = asyncio.create_task(host.call(server, "act", sent({"filler": "x" * 400_000})))
    await asyncio.sleep(0.1)
    second = await host.call(server, "act", sent({}))
    assert (await first).outcome_unknown
    assert (second.is_error, second.outcome_unknown) == (True, False), second.text
