"""Tests of tool lists: complete, in order, cached, and read again after a change."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.mcp.arguments import sent
from tests.mcp.conftest import HTTP_TRANSPORTS, SLOW_STDIO, TRANSPORTS, Upstream
from unisono.core.tool_approvals import Approval, ToolFilter
from unisono.core.tool_host import HostedTool, ToolServer, ToolTransport
from unisono.errors import (
    InvalidRequest,
    ToolServerError,
    ToolServerNotAllowed,
    ToolServerTimeout,
    ToolServerUnavailable,
    UnisonoError,
)
from unisono.mcp import McpHost, McpLimits

NAMES = ["echo", "mixed", "facts", "slow", "steps", "huge", "broken", "grow"]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_tools_are_listed_for_each_transport(host: McpHost, upstream: Upstream, transport: str) -> None:
    listed = await host.list_tools(upstream.server(transport))
    assert [tool.name for tool in listed.tools][: len(NAMES)] == NAMES
    echo = listed.tools[0]
    assert (echo.server, echo.description, echo.read_only) == (transport, "Says what it is told.", True)
    assert echo.schema["required"] == ["text"]
    assert not listed.tools[1].read_only


FILTERS = {
    "names": (ToolFilter(names=frozenset({"huge", "echo", "nobody"})), ["echo", "huge"]),
    "read-only tools": (ToolFilter(read_only=True), ["echo"]),
    "names and read-only": (ToolFilter(names=frozenset({"huge"}), read_only=True), []),
    "no names": (ToolFilter(names=frozenset()), []),
}


@pytest.mark.parametrize(("allowed", "names"), FILTERS.values(), ids=FILTERS)
async def test_only_allowed_tools_are_listed_and_called(
    host: McpHost, upstream: Upstream, allowed: ToolFilter, names: list[str]
) -> None:
    server = upstream.server("modern", allowed=allowed)
    assert [tool.name for tool in (await host.list_tools(server)).tools] == names
    for tool, arguments in (("echo", {"text": "a"}), ("facts", {})):
        assert (await host.call(server, tool, sent(arguments))).is_error is (tool not in names)


@pytest.mark.parametrize("transport", ["modern", "modern_json", "legacy", "legacy_json", "sse", SLOW_STDIO])
async def test_list_is_cached_until_the_server_reports_a_change(
    host: McpHost, upstream: Upstream, transport: str
) -> None:
    server = upstream.server(transport)
    before = await host.list_tools(server)
    assert await host.list_tools(server) == before
    new_name = f"grown_{transport}_{len(before.tools)}"
    await host.call(server, "grow", sent({"name": new_name}))
    async with asyncio.timeout(5):
        while (after := await host.list_tools(server)).digest == before.digest:
            await asyncio.sleep(0.02)
    assert [tool.name for tool in after.tools] == [*(tool.name for tool in before.tools), new_name]


async def test_cached_list_without_notifications_expires(upstream: Upstream) -> None:
    host = McpHost(limits=McpLimits(list_ttl_s=0.2))
    server = upstream.server("stateless")
    before = await host.list_tools(server)
    await host.call(server, "grow", sent({"name": "another"}))
    assert await host.list_tools(server) == before
    await asyncio.sleep(0.25)
    assert (await host.list_tools(server)).tools[-1].name == "another"
    await host.aclose()


def test_digest_depends_on_every_field_and_the_order() -> None:
    from unisono.mcp.fingerprints import digest_of

    first = HostedTool("docs", "search", "Finds.", {"type": "object"})
    other = replace(first, name="fetch")
    lists = [
        (first, other),
        (other, first),
        (first,),
        (),
        (replace(first, description="Finds!"), other),
        (replace(first, schema={"type": "object", "properties": {}}), other),
        (replace(first, annotations={"readOnlyHint": True}), other),
    ]
    assert len({digest_of(tools) for tools in lists}) == len(lists)
    assert digest_of((first, other)) == digest_of((replace(first), replace(other)))


STDIO = ToolTransport.STDIO
UNUSABLE: dict[str, tuple[ToolServer, type[UnisonoError]]] = {
    "no address": (ToolServer("a", configured=True), InvalidRequest),
    "stdio without a command": (ToolServer("a", transport=STDIO, configured=True), InvalidRequest),
    "stdio with an address": (ToolServer("a", "https://b.example/", transport=STDIO, configured=True), InvalidRequest),
    "closed port": (ToolServer("a", "http://127.0.0.1:1/mcp", configured=True), ToolServerUnavailable),
    "unknown scheme": (ToolServer("a", "gopher://127.0.0.1/", configured=True), ToolServerUnavailable),
    "unknown host": (ToolServer("a", "http://nobody.invalid/", configured=True), ToolServerUnavailable),
    "server of a request": (ToolServer("a", "https://b.example/mcp"), ToolServerNotAllowed),
}


@pytest.mark.parametrize(("server", "error"), UNUSABLE.values(), ids=UNUSABLE)
async def test_unusable_server_is_an_error(host: McpHost, server: ToolServer, error: type[UnisonoError]) -> None:
    with pytest.raises(error) as raised:
        await host.list_tools(server)
    assert "127.0.0.1" not in raised.value.message
    if issubclass(error, ToolServerError):
        # During a response the model gets the error as an outcome.
        outcome = await host.call(server, "echo", sent({}))
        assert outcome.is_error
        assert not outcome.outcome_unknown
    else:
        with pytest.raises(error):
            await host.call(server, "echo", sent({}))


async def test_broken_server_does_not_affect_others(host: McpHost, upstream: Upstream) -> None:
    broken = ToolServer("broken", "http://127.0.0.1:1/mcp", configured=True)
    results = await asyncio.gather(
        *(host.list_tools(server) for server in (upstream.server("modern"), broken, upstream.server("legacy"))),
        return_exceptions=True,
    )
    assert [isinstance(result, ToolServerUnavailable) for result in results] == [False, True, False]


async def test_list_request_has_a_deadline(host: McpHost, upstream: Upstream) -> None:
    with pytest.raises(ToolServerTimeout):
        await host.list_tools(upstream.server("modern"), deadline=asyncio.get_running_loop().time())
    assert (await host.list_tools(upstream.server("modern"))).tools


@pytest.mark.parametrize("transport", HTTP_TRANSPORTS)
async def test_concurrent_list_requests_get_the_same_list(host: McpHost, upstream: Upstream, transport: str) -> None:
    lists = await asyncio.gather(*(host.list_tools(upstream.server(transport)) for _ in range(20)))
    assert len({listed.digest for listed in lists}) == 1


HINTED = HostedTool("a", "read", annotations={"readOnlyHint": True})
PLAIN = HostedTool("a", "write")
APPROVALS = {
    "default": (Approval(), True, True),
    "never": (Approval(otherwise=False), False, False),
    "never for one tool": (Approval(never=ToolFilter(names=frozenset({"read"}))), False, True),
    "never for read-only tools": (Approval(never=ToolFilter(read_only=True)), False, True),
    "always for one tool": (Approval(always=ToolFilter(names=frozenset({"write"})), otherwise=False), False, True),
    "always has priority": (
        Approval(always=ToolFilter(names=frozenset({"read"})), never=ToolFilter(), otherwise=False),
        True,
        False,
    ),
}


@pytest.mark.parametrize(("approval", "read", "write"), APPROVALS.values(), ids=APPROVALS)
def test_approval_is_needed_unless_configured_otherwise(approval: Approval, read: bool, write: bool) -> None:
    assert (approval.needed(HINTED), approval.needed(PLAIN)) == (read, write)
