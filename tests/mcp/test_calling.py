"""Tests of tool calls: every transport, results, limits, cancellation and servers that die."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mcp.arguments import sent
from tests.mcp.conftest import HTTP_TRANSPORTS, SLOW_STDIO, TRANSPORTS, Upstream, start_upstream
from unisono.core.server_tool_arguments import read_arguments
from unisono.core.tool_host import ToolTimeouts
from unisono.mcp import McpHost, McpLimits
from unisono.mcp.http_transport import default_tls

# Transports whose servers stop working when a call is cancelled. The SDK's server does not notice it in the other two
# cases; the tests of raw sockets check that the connection is closed.
CANCELLABLE = frozenset(TRANSPORTS) - {"stateless", "modern_json"}

MIXED = """words
[image: image/png, 3 bytes]
[audio: audio/wav, 6 bytes]
[resource: report, http://127.0.0.1:9/secret, text/plain]
a note"""


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_call_returns_text_for_each_content_type(host: McpHost, upstream: Upstream, transport: str) -> None:
    server = upstream.server(transport)
    assert (await host.call(server, "echo", sent({"text": "så ⟂"}))).text == "så ⟂"
    assert (await host.call(server, "mixed", sent({}))).text == MIXED
    facts = await host.call(server, "facts", sent({}))
    assert (facts.text, facts.structured) == ('{"answer":42}', {"answer": 42})


async def test_connections_share_the_certificate_authorities(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    default_tls()
    # The library loads them here if a connection has no context.
    monkeypatch.delattr("httpcore2.default_ssl_context")
    host = McpHost()
    assert (await host.call(upstream.server("modern"), "echo", sent({"text": "hello"}))).text == "hello"
    await host.aclose()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("transport", [*HTTP_TRANSPORTS, "sse", SLOW_STDIO])
async def test_tool_error_is_an_outcome(host: McpHost, upstream: Upstream, transport: str) -> None:
    server = upstream.server(transport)
    wrong = (("broken", {}), ("nobody", {}), ("echo", {"text": 5}), ("echo", {}), ("files", {"name": "a"}))
    for tool, arguments in wrong:
        outcome = await host.call(server, tool, sent(arguments))
        assert outcome.is_error
        assert not outcome.outcome_unknown
        assert outcome.text


@pytest.mark.parametrize("transport", ["modern", "legacy", "sse", SLOW_STDIO])
async def test_progress_is_reported(host: McpHost, upstream: Upstream, transport: str) -> None:
    progress_events: list[tuple[float, float | None, str]] = []
    outcome = await host.call(
        upstream.server(transport), "steps", sent({}), progress=lambda *step: progress_events.append(step)
    )
    assert outcome.text == "walked"
    assert sorted(progress_events) == [(1, 3, "step 1"), (2, 3, "step 2"), (3, 3, "step 3")]


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("transport", [*HTTP_TRANSPORTS, "sse", SLOW_STDIO])
async def test_long_result_is_truncated(upstream: Upstream, transport: str) -> None:
    host = McpHost(limits=McpLimits(output_bytes=1000))
    outcome = await host.call(upstream.server(transport), "huge", sent({"size": 300_000}))
    assert outcome.text == "ü" * 500 + "\n[truncated: the result has 300000 bytes; only its beginning is included]"
    await host.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_result_above_the_size_limit_is_not_read_to_its_end(upstream: Upstream, transport: str) -> None:
    host = McpHost(limits=McpLimits(answer_bytes=200_000))
    server = upstream.server(transport)
    started = time.monotonic()
    outcome = await host.call(server, "huge", sent({"size": 30_000_000}))
    assert outcome.is_error
    assert len(outcome.text) < 300
    assert time.monotonic() - started < 5
    assert (await host.call(server, "echo", sent({"text": "still here"}))).text == "still here"
    await host.aclose()


@pytest.mark.slow
async def test_oversized_result_is_not_held_in_memory(host: McpHost, upstream: Upstream) -> None:
    before = _resident_bytes()
    outcome = await host.call(upstream.server("modern_json"), "huge", sent({"size": 100_000_000}))
    assert outcome.is_error
    assert _resident_bytes() - before < 60 << 20


async def test_oversized_arguments_are_not_sent(host: McpHost, upstream: Upstream) -> None:
    outcome = await host.call(upstream.server("modern"), "echo", sent({"text": "x" * (1 << 20)}))
    assert outcome.is_error
    assert "bytes" in outcome.text
    assert upstream.noted("xxxx") == []


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("transport", [*HTTP_TRANSPORTS, "sse", SLOW_STDIO])
async def test_long_number_in_arguments_is_sent_unchanged(host: McpHost, upstream: Upstream, transport: str) -> None:
    digits = "7" * 4_000
    outcome = await host.call(upstream.server(transport), "digits", read_arguments("", f'{{"number":{digits}}}'))
    assert outcome.text == digits


@pytest.mark.parametrize("transport", sorted(set(TRANSPORTS) - {"stdio"}))
async def test_unreadable_arguments_are_an_immediate_error(host: McpHost, upstream: Upstream, transport: str) -> None:
    for arguments in (f'{{"number":{"7" * 5_000}}}', '{"number":' + "[" * 3_000 + "]" * 3_000 + "}"):
        outcome = await host.call(upstream.server(transport), "digits", read_arguments("", arguments))
        assert (outcome.is_error, outcome.outcome_unknown) == (True, False)
        assert "refused the call: HTTP 400." in outcome.text
    assert (await host.call(upstream.server(transport), "echo", sent({"text": "next"}))).text == "next"


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("transport", [*HTTP_TRANSPORTS, "sse", SLOW_STDIO])
async def test_call_timeout_cancels_the_call_on_the_server(host: McpHost, upstream: Upstream, transport: str) -> None:
    server = upstream.server(transport, timeouts=ToolTimeouts(call_s=0.3, connect_s=20))
    await host.list_tools(server)
    started = time.monotonic()
    outcome = await host.call(server, "slow", sent({"seconds": 30, "name": f"timeout {transport}"}))
    assert time.monotonic() - started < 1.5
    assert (outcome.is_error, outcome.outcome_unknown) == (True, True)
    if transport in CANCELLABLE:
        await upstream.until_noted(f"slow cancelled timeout {transport}")
    assert (await host.call(server, "echo", sent({"text": "next"}))).text == "next"


async def test_call_ends_at_the_deadline_of_its_caller(host: McpHost, upstream: Upstream) -> None:
    server = upstream.server("modern")
    await host.list_tools(server)
    started = time.monotonic()
    deadline = asyncio.get_running_loop().time() + 0.3
    assert (await host.call(server, "slow", sent({"seconds": 30}), deadline=deadline)).outcome_unknown
    assert time.monotonic() - started < 1


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_cancelled_call_ends_immediately_and_is_cancelled_on_the_server(
    host: McpHost, upstream: Upstream, transport: str
) -> None:
    server = upstream.server(transport)
    calls = [
        asyncio.create_task(host.call(server, "slow", sent({"seconds": 30, "name": f"left {transport} {index}"})))
        for index in range(3)
    ]
    remaining_call = asyncio.create_task(
        host.call(server, "slow", sent({"seconds": 0.6, "name": f"stays {transport}"}))
    )
    for index in range(3):
        await upstream.until_noted(f"slow begins left {transport} {index}")
    await upstream.until_noted(f"slow begins stays {transport}")
    started = time.monotonic()
    for call in calls:
        call.cancel()
    done, _ = await asyncio.wait(calls)
    assert time.monotonic() - started < 0.25
    assert all(call.cancelled() for call in done)
    if transport in CANCELLABLE:
        for index in range(3):
            await upstream.until_noted(f"slow cancelled left {transport} {index}")
    assert (await remaining_call).text == "done"


async def test_calls_above_the_concurrency_limit_wait_in_order(host: McpHost, upstream: Upstream) -> None:
    server = upstream.server("modern", concurrent=2)
    names = [f"place {index}" for index in range(6)]
    started = time.monotonic()
    outcomes = await asyncio.gather(
        *(host.call(server, "slow", sent({"seconds": 0.2, "name": name})) for name in names)
    )
    assert [outcome.text for outcome in outcomes] == ["done"] * 6
    assert 0.6 <= time.monotonic() - started < 3
    start_notes = upstream.noted("slow begins place")
    assert [sorted(start_notes[at : at + 2]) for at in (0, 2, 4)] == [
        [f"slow begins {name}" for name in names[at : at + 2]] for at in (0, 2, 4)
    ]


async def test_call_that_times_out_in_the_queue_is_not_sent(host: McpHost, upstream: Upstream) -> None:
    server = upstream.server("modern", concurrent=1)
    first = asyncio.create_task(host.call(server, "slow", sent({"seconds": 1, "name": "holds"})))
    await upstream.until_noted("slow begins holds")
    deadline = asyncio.get_running_loop().time() + 0.2
    outcome = await host.call(server, "slow", sent({"seconds": 0, "name": "waits"}), deadline=deadline)
    assert (outcome.is_error, outcome.outcome_unknown) == (True, False)
    waiting = asyncio.create_task(host.call(server, "slow", sent({"seconds": 0, "name": "leaves"})))
    await asyncio.sleep(0.05)
    waiting.cancel()
    assert (await first).text == "done"
    assert (await host.call(server, "echo", sent({"text": "free again"}))).text == "free again"
    assert upstream.noted("waits") == upstream.noted("leaves") == []


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("transport", ["modern", "modern_json", "legacy", "legacy_json", "sse"])
async def test_call_to_a_server_that_dies_has_an_unknown_outcome(host: McpHost, tmp_path: Path, transport: str) -> None:
    with start_upstream(tmp_path) as (_, upstream):
        server = upstream.server(transport)
        assert (await host.call(server, "echo", sent({"text": "before"}))).text == "before"
        started = time.monotonic()
        outcome = await host.call(server, "die", sent({}))
        assert (outcome.is_error, outcome.outcome_unknown) == (True, True)
        assert time.monotonic() - started < 5
        assert len(upstream.noted("die")) == 1
        # Its other connections close one by one; a call on one of them would have an unknown outcome too.
        await asyncio.sleep(0.1)
        after = await host.call(server, "echo", sent({"text": "after"}))
        assert (after.is_error, after.outcome_unknown) == (True, False), after.text


@pytest.mark.slow
async def test_process_that_died_is_restarted_for_the_next_call(host: McpHost, upstream: Upstream) -> None:
    server = upstream.server("stdio")
    outcome = await host.call(server, "die", sent({"name": "stdio"}))
    assert (outcome.is_error, outcome.outcome_unknown) == (True, True)
    assert upstream.noted("die stdio") == ["die stdio"]
    assert (await host.call(server, "echo", sent({"text": "again"}))).text == "again"


@pytest.mark.slow
async def test_server_with_a_new_address_is_reached_after_a_restart(host: McpHost, tmp_path: Path) -> None:
    """Connections to the old process are useless. Nothing was sent, so the call is repeated."""
    with start_upstream(tmp_path) as (process, upstream):
        server = upstream.server("legacy")
        await host.list_tools(server)
        process.kill()
        process.wait()
        assert (await host.call(server, "echo", sent({"text": "gone"}))).is_error
        with start_upstream(tmp_path) as (_, successor):
            moved = replace(server, url=successor.urls["legacy"])
            assert (await host.call(moved, "echo", sent({"text": "back"}))).text == "back"


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
