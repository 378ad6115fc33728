"""Total time limits of lists and calls: a server that always sends a little more cannot extend them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable

import pytest

from tests.fakes.wire import Seen, Sleep, Step, WireServer, Write
from tests.mcp.arguments import sent
from tests.mcp.hostile import EVENTS, TOOL, Acting, Hostile, answer, text
from unisono.core.tools import Command, ToolServer, ToolTimeouts, ToolTransport
from unisono.errors import ToolServerTimeout
from unisono.mcp import McpHost

LIST_S = 0.6
TIMEOUTS = ToolTimeouts(connect_s=6.0, list_s=LIST_S, call_s=LIST_S)
MAX_S = 4.0
"""Less than connecting may take, and enough for a busy machine."""

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n"


def dripping(head: bytes, drop: bytes = b" ") -> list[Step]:
    return [Write(head), *[step for _ in range(200) for step in (Write(drop), Sleep(0.05))]]


def never_ready(seen: Seen) -> Iterable[Step]:
    return dripping(EVENTS, b": wait\n\n") if seen.method == "GET" else dripping(HEAD)


def endless_pages(seen: Seen) -> Iterable[Step]:
    cursor = str((seen.json.get("params") or {}).get("cursor"))
    return [Sleep(0.15), answer(seen, {"tools": [{**TOOL, "name": "act" + cursor}], "nextCursor": cursor + "1"})]


LISTINGS: dict[str, Acting] = {
    "bytes of a body": lambda seen: dripping(HEAD),
    "comments of a stream": lambda seen: dripping(EVENTS, b": wait\n\n"),
    "header lines": lambda seen: dripping(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "pages": endless_pages,
}

QUICK = ("bytes of a body", "pages")
"""Listings that every test run tries."""


async def is_late(host: McpHost, server: ToolServer) -> None:
    begun = time.monotonic()
    with pytest.raises(ToolServerTimeout):
        await host.list_tools(server)
    assert time.monotonic() - begun < MAX_S


@pytest.mark.parametrize(
    "transport", [ToolTransport.STREAMABLE_HTTP, pytest.param(ToolTransport.SSE, marks=pytest.mark.slow)]
)
async def test_a_list_is_late_in_time_where_the_connection_drips(host: McpHost, transport: ToolTransport) -> None:
    async with WireServer(never_ready) as server:
        url = f"{server.url}/mcp"
        await is_late(host, ToolServer("hostile", url, configured=True, timeouts=TIMEOUTS, transport=transport))


@pytest.mark.parametrize(
    "listing",
    [pytest.param(act, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, act in LISTINGS.items()],
)
async def test_a_list_is_late_in_time_where_the_list_drips(host: McpHost, listing: Acting) -> None:
    async with Hostile(lambda seen: [text(seen)], listing=listing) as hostile:
        await is_late(host, hostile.server(timeouts=TIMEOUTS))


@pytest.mark.slow
async def test_a_list_is_late_in_time_where_a_process_drips(host: McpHost) -> None:
    drip = "import sys, time\nwhile True:\n    sys.stdout.write(' ')\n    sys.stdout.flush()\n    time.sleep(0.05)"
    command = Command((sys.executable, "-c", drip))
    await is_late(
        host,
        ToolServer("hostile", command=command, transport=ToolTransport.STDIO, configured=True, timeouts=TIMEOUTS),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LISTINGS if name != "pages"])
async def test_a_call_is_late_in_time_where_its_answer_drips(host: McpHost, name: str) -> None:
    async with Hostile(LISTINGS[name]) as hostile:
        begun = time.monotonic()
        outcome = await host.call(hostile.server(timeouts=TIMEOUTS), "act", sent({}))
        assert (outcome.is_error, outcome.outcome_unknown) == (True, True)
        assert time.monotonic() - begun < MAX_S


@pytest.mark.slow
async def test_a_list_that_was_late_is_had_later_over_the_connection_that_stands_by_then(host: McpHost) -> None:
    """Connecting takes longer than the list may; the connection is not thrown away with the first request."""

    class Slow(Hostile):
        def _respond(self, seen: Seen) -> Iterable[Step]:
            steps = list(super()._respond(seen))
            return [Sleep(1.0), *steps] if seen.method == "POST" and seen.json["method"] == "initialize" else steps

    async with Slow(lambda seen: [text(seen)]) as slow:
        server = slow.server(timeouts=TIMEOUTS)
        await is_late(host, server)
        await asyncio.sleep(0.5)
        assert [tool.name for tool in (await host.list_tools(server)).tools] == ["act"]
