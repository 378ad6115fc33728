"""Tests of total time limits, which a server cannot extend by trickling data."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable

import pytest

from tests.fakes.wire import Seen, Sleep, Step, WireServer, Write
from tests.mcp.arguments import sent
from tests.mcp.hostile import EVENTS, TOOL, Acting, Hostile, answer, text
from unisono.core.tool_host import Command, ToolServer, ToolTimeouts, ToolTransport
from unisono.errors import ToolServerTimeout
from unisono.mcp import McpHost

LIST_S = 0.6
TIMEOUTS = ToolTimeouts(connect_s=6.0, list_s=LIST_S, call_s=LIST_S)
# Below the connect timeout, with allowance for a busy machine.
MAX_S = 4.0

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n"


def trickle(head: bytes, drop: bytes = b" ") -> list[Step]:
    return [Write(head), *[step for _ in range(200) for step in (Write(drop), Sleep(0.05))]]


def never_ready(seen: Seen) -> Iterable[Step]:
    return trickle(EVENTS, b": wait\n\n") if seen.method == "GET" else trickle(HEAD)


def endless_pages(seen: Seen) -> Iterable[Step]:
    cursor = str((seen.json.get("params") or {}).get("cursor"))
    return [Sleep(0.15), answer(seen, {"tools": [{**TOOL, "name": "act" + cursor}], "nextCursor": cursor + "1"})]


LISTINGS: dict[str, Acting] = {
    "bytes of a body": lambda seen: trickle(HEAD),
    "comments of a stream": lambda seen: trickle(EVENTS, b": wait\n\n"),
    "header lines": lambda seen: trickle(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "pages": endless_pages,
}

# Listings of the quick test run.
QUICK_LISTINGS = ("bytes of a body", "pages")


async def assert_list_times_out(host: McpHost, server: ToolServer) -> None:
    started = time.monotonic()
    with pytest.raises(ToolServerTimeout):
        await host.list_tools(server)
    assert time.monotonic() - started < MAX_S


@pytest.mark.parametrize(
    "transport", [ToolTransport.STREAMABLE_HTTP, pytest.param(ToolTransport.SSE, marks=pytest.mark.slow)]
)
async def test_list_times_out_while_the_handshake_trickles(host: McpHost, transport: ToolTransport) -> None:
    async with WireServer(never_ready) as server:
        url = f"{server.url}/mcp"
        await assert_list_times_out(
            host, ToolServer("hostile", url, configured=True, timeouts=TIMEOUTS, transport=transport)
        )


@pytest.mark.parametrize(
    "listing",
    [
        pytest.param(act, id=name, marks=() if name in QUICK_LISTINGS else pytest.mark.slow)
        for name, act in LISTINGS.items()
    ],
)
async def test_list_times_out_while_its_response_trickles(host: McpHost, listing: Acting) -> None:
    async with Hostile(lambda seen: [text(seen)], listing=listing) as hostile:
        await assert_list_times_out(host, hostile.server(timeouts=TIMEOUTS))


@pytest.mark.slow
async def test_list_times_out_while_a_process_trickles(host: McpHost) -> None:
    program = "import sys, time\nwhile True:\n    sys.stdout.write(' ')\n    sys.stdout.flush()\n    time.sleep(0.05)"
    command = Command((sys.executable, "-c", program))
    await assert_list_times_out(
        host,
        ToolServer("hostile", command=command, transport=ToolTransport.STDIO, configured=True, timeouts=TIMEOUTS),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LISTINGS if name != "pages"])
async def test_call_times_out_while_its_answer_trickles(host: McpHost, name: str) -> None:
    async with Hostile(LISTINGS[name]) as hostile:
        started = time.monotonic()
        outcome = await host.call(hostile.server(timeouts=TIMEOUTS), "act", sent({}))
        assert (outcome.is_error, outcome.outcome_unknown) == (True, True)
        assert time.monotonic() - started < MAX_S


@pytest.mark.slow
async def test_list_after_a_timeout_uses_the_connection_made_meanwhile(host: McpHost) -> None:
    """Connecting takes longer than the list timeout; the connection survives the failed request."""

    class SlowHandshake(Hostile):
        def _respond(self, seen: Seen) -> Iterable[Step]:
            steps = list(super()._respond(seen))
            return [Sleep(1.0), *steps] if seen.method == "POST" and seen.json["method"] == "initialize" else steps

    async with SlowHandshake(lambda seen: [text(seen)]) as hostile:
        server = hostile.server(timeouts=TIMEOUTS)
        await assert_list_times_out(host, server)
        await asyncio.sleep(0.5)
        assert [tool.name for tool in (await host.list_tools(server)).tools] == ["act"]
