"""Lists of tools: whole, in order, remembered, and asked for again once they changed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.mcp.arguments import sent
from tests.mcp.conftest import HTTP_WAYS, WAYS, Upstream
from unisono.core.tools import Approval, HostedTool, ToolFilter, ToolServer, ToolTransport
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


@pytest.mark.parametrize("way", WAYS)
async def test_a_server_lists_its_tools_whatever_it_speaks(host: McpHost, upstream: Upstream, way: str) -> None:
    listed = await host.list_tools(upstream.server(way))
    assert [tool.name for tool in listed.tools][: len(NAMES)] == NAMES
    echo = listed.tools[0]
    assert (echo.server, echo.description, echo.read_only) == (way, "Says what it is told.", True)
    assert echo.schema["required"] == ["text"]
    assert not listed.tools[1].read_only


FILTERS = {
    "by name": (ToolFilter(names=frozenset({"huge", "echo", "nobody"})), ["echo", "huge"]),
    "what only reads": (ToolFilter(read_only=True), ["echo"]),
    "both": (ToolFilter(names=frozenset({"huge"}), read_only=True), []),
    "none": (ToolFilter(names=frozenset()), []),
}


@pytest.mark.parametrize(("allowed", "names"), FILTERS.values(), ids=FILTERS)
async def test_only_allowed_tools_are_listed_and_called(
    host: McpHost, upstream: Upstream, allowed: ToolFilter, names: list[str]
) -> None:
    server = upstream.server("modern", allowed=allowed)
    assert [tool.name for tool in (await host.list_tools(server)).tools] == names
    for tool, arguments in (("echo", {"text": "a"}), ("facts", {})):
        assert (await host.call(server, tool, sent(arguments))).is_error is (tool not in names)


@pytest.mark.parametrize("way", ["modern", "modern_json", "legacy", "legacy_json", "sse", "stdio"])
async def test_a_list_is_remembered_until_its_server_says_it_changed(
    host: McpHost, upstream: Upstream, way: str
) -> None:
    server = upstream.server(way)
    before = await host.list_tools(server)
    assert await host.list_tools(server) == before
    grown = f"grown_{way}_{len(before.tools)}"
    await host.call(server, "grow", sent({"name": grown}))
    async with asyncio.timeout(5):
        while (after := await host.list_tools(server)).digest == before.digest:
            await asyncio.sleep(0.02)
    assert [tool.name for tool in after.tools] == [*(tool.name for tool in before.tools), grown]


async def test_a_list_of_a_server_that_never_tells_is_asked_for_again_when_it_is_old(upstream: Upstream) -> None:
    host = McpHost(limits=McpLimits(list_ttl_s=0.2))
    server = upstream.server("stateless")
    before = await host.list_tools(server)
    await host.call(server, "grow", sent({"name": "another"}))
    assert await host.list_tools(server) == before
    await asyncio.sleep(0.25)
    assert (await host.list_tools(server)).tools[-1].name == "another"
    await host.aclose()


def test_a_digest_pins_every_word_and_the_order() -> None:
    from unisono.mcp.fingerprints import digest_of

    one = HostedTool("docs", "search", "Finds.", {"type": "object"})
    other = replace(one, name="fetch")
    lists = [
        (one, other),
        (other, one),
        (one,),
        (),
        (replace(one, description="Finds!"), other),
        (replace(one, schema={"type": "object", "properties": {}}), other),
        (replace(one, annotations={"readOnlyHint": True}), other),
    ]
    assert len({digest_of(tools) for tools in lists}) == len(lists)
    assert digest_of((one, other)) == digest_of((replace(one), replace(other)))


STDIO = ToolTransport.STDIO
WRONG: dict[str, tuple[ToolServer, type[UnisonoError]]] = {
    "nothing to reach": (ToolServer("a", configured=True), InvalidRequest),
    "stdio without a command": (ToolServer("a", transport=STDIO, configured=True), InvalidRequest),
    "stdio with an address": (ToolServer("a", "https://b.example/", transport=STDIO, configured=True), InvalidRequest),
    "nobody listens": (ToolServer("a", "http://127.0.0.1:1/mcp", configured=True), ToolServerUnavailable),
    "no such scheme": (ToolServer("a", "gopher://127.0.0.1/", configured=True), ToolServerUnavailable),
    "no such name": (ToolServer("a", "http://nobody.invalid/", configured=True), ToolServerUnavailable),
    "named by a request": (ToolServer("a", "https://b.example/mcp"), ToolServerNotAllowed),
}


@pytest.mark.parametrize(("server", "error"), WRONG.values(), ids=WRONG)
async def test_a_server_that_cannot_be_used_is_an_error_of_the_request(
    host: McpHost, server: ToolServer, error: type[UnisonoError]
) -> None:
    with pytest.raises(error) as raised:
        await host.list_tools(server)
    assert "127.0.0.1" not in raised.value.message
    if issubclass(error, ToolServerError):
        # In the middle of a response it is something the model can be told.
        outcome = await host.call(server, "echo", sent({}))
        assert outcome.is_error
        assert not outcome.outcome_unknown
    else:
        with pytest.raises(error):
            await host.call(server, "echo", sent({}))


async def test_one_broken_server_is_no_other_servers_business(host: McpHost, upstream: Upstream) -> None:
    broken = ToolServer("broken", "http://127.0.0.1:1/mcp", configured=True)
    results = await asyncio.gather(
        *(host.list_tools(server) for server in (upstream.server("modern"), broken, upstream.server("legacy"))),
        return_exceptions=True,
    )
    assert [isinstance(result, ToolServerUnavailable) for result in results] == [False, True, False]


async def test_a_list_has_a_deadline(host: McpHost, upstream: Upstream) -> None:
    with pytest.raises(ToolServerTimeout):
        await host.list_tools(upstream.server("modern"), deadline=asyncio.get_running_loop().time())
    assert (await host.list_tools(upstream.server("modern"))).tools


@pytest.mark.parametrize("way", HTTP_WAYS)
async def test_many_who_ask_at_once_share_one_list(host: McpHost, upstream: Upstream, way: str) -> None:
    lists = await asyncio.gather(*(host.list_tools(upstream.server(way)) for _ in range(20)))
    assert len({listed.digest for listed in lists}) == 1


HINTED = HostedTool("a", "read", annotations={"readOnlyHint": True})
PLAIN = HostedTool("a", "write")
APPROVALS = {
    "nothing said": (Approval(), True, True),
    "never": (Approval(otherwise=False), False, False),
    "never for one": (Approval(never=ToolFilter(names=frozenset({"read"}))), False, True),
    "never for what only reads": (Approval(never=ToolFilter(read_only=True)), False, True),
    "always for one": (Approval(always=ToolFilter(names=frozenset({"write"})), otherwise=False), False, True),
    "always wins": (
        Approval(always=ToolFilter(names=frozenset({"read"})), never=ToolFilter(), otherwise=False),
        True,
        False,
    ),
}


@pytest.mark.parametrize(("approval", "read", "write"), APPROVALS.values(), ids=APPROVALS)
def test_approval_is_needed_unless_somebody_said_otherwise(approval: Approval, read: bool, write: bool) -> None:
    assert (approval.needed(HINTED), approval.needed(PLAIN)) == (read, write)
