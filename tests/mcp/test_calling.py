"""Calls: every way there is, every kind of answer, bounds, leaving, and servers that die on the way."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mcp.arguments import sent
from tests.mcp.conftest import WAYS, Upstream, start_upstream
from unisono.core.tool_arguments import read_arguments
from unisono.core.tools import ToolTimeouts
from unisono.mcp import McpHost, McpLimits

HEARS = frozenset(WAYS) - {"stateless", "modern_json"}
"""Servers that stop working when they are told. The SDK's own does not notice in the other two cases; that the
connection goes down is tested at the wire."""

MIXED = """words
[image: image/png, 3 bytes]
[audio: audio/wav, 6 bytes]
[resource: report, http://127.0.0.1:9/secret, text/plain]
a note"""


@pytest.mark.parametrize("way", WAYS)
async def test_a_call_comes_back_as_text(host: McpHost, upstream: Upstream, way: str) -> None:
    server = upstream.server(way)
    assert (await host.call(server, "echo", sent({"text": "så ⟂"}))).text == "så ⟂"
    assert (await host.call(server, "mixed", sent({}))).text == MIXED
    facts = await host.call(server, "facts", sent({}))
    assert (facts.text, facts.structured) == ('{"answer":42}', {"answer": 42})


@pytest.mark.parametrize("way", WAYS)
async def test_what_a_tool_does_wrong_is_an_outcome(host: McpHost, upstream: Upstream, way: str) -> None:
    server = upstream.server(way)
    for tool, arguments in (("broken", {}), ("nobody", {}), ("echo", {"text": 5}), ("echo", {})):
        outcome = await host.call(server, tool, sent(arguments))
        assert outcome.is_error
        assert not outcome.outcome_unknown
        assert outcome.text


@pytest.mark.parametrize("way", ["modern", "legacy", "sse", "stdio"])
async def test_progress_is_told(host: McpHost, upstream: Upstream, way: str) -> None:
    told: list[tuple[float, float | None, str]] = []
    outcome = await host.call(upstream.server(way), "steps", sent({}), progress=lambda *step: told.append(step))
    assert outcome.text == "walked"
    assert sorted(told) == [(1, 3, "step 1"), (2, 3, "step 2"), (3, 3, "step 3")]


@pytest.mark.parametrize("way", WAYS)
async def test_a_long_result_is_cut(upstream: Upstream, way: str) -> None:
    host = McpHost(limits=McpLimits(output_bytes=1000))
    outcome = await host.call(upstream.server(way), "huge", sent({"size": 300_000}))
    assert outcome.text == "ü" * 500 + "\n[truncated: the result has 300000 bytes; only its beginning is included]"
    await host.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_a_result_larger_than_is_taken_is_not_read_to_its_end(upstream: Upstream, way: str) -> None:
    host = McpHost(limits=McpLimits(answer_bytes=200_000))
    server = upstream.server(way)
    begun = time.monotonic()
    outcome = await host.call(server, "huge", sent({"size": 30_000_000}))
    assert outcome.is_error
    assert len(outcome.text) < 300
    assert time.monotonic() - begun < 5
    assert (await host.call(server, "echo", sent({"text": "still here"}))).text == "still here"
    await host.aclose()


@pytest.mark.slow
async def test_a_hundred_megabytes_cost_no_hundred_megabytes(host: McpHost, upstream: Upstream) -> None:
    before = _resident()
    outcome = await host.call(upstream.server("modern_json"), "huge", sent({"size": 100_000_000}))
    assert outcome.is_error
    assert _resident() - before < 60 << 20


async def test_arguments_are_bounded(host: McpHost, upstream: Upstream) -> None:
    outcome = await host.call(upstream.server("modern"), "echo", sent({"text": "x" * (1 << 20)}))
    assert outcome.is_error
    assert "bytes" in outcome.text
    assert upstream.noted("xxxx") == []


@pytest.mark.parametrize("way", WAYS)
async def test_a_server_gets_the_digits_that_the_model_wrote(host: McpHost, upstream: Upstream, way: str) -> None:
    digits = "7" * 4_000
    outcome = await host.call(upstream.server(way), "digits", read_arguments("", f'{{"number":{digits}}}'))
    assert outcome.text == digits


@pytest.mark.parametrize("way", sorted(set(WAYS) - {"stdio"}))
async def test_a_server_that_cannot_read_the_arguments_is_an_error_at_once(
    host: McpHost, upstream: Upstream, way: str
) -> None:
    for arguments in (f'{{"number":{"7" * 5_000}}}', '{"number":' + "[" * 3_000 + "]" * 3_000 + "}"):
        outcome = await host.call(upstream.server(way), "digits", read_arguments("", arguments))
        assert (outcome.is_error, outcome.outcome_unknown) == (True, False)
        assert "refused the call: HTTP 400." in outcome.text
    assert (await host.call(upstream.server(way), "echo", sent({"text": "next"}))).text == "next"


@pytest.mark.parametrize("way", WAYS)
async def test_a_call_has_a_time_of_its_own_and_the_server_is_told(host: McpHost, upstream: Upstream, way: str) -> None:
    server = upstream.server(way, timeouts=ToolTimeouts(call_s=0.3, connect_s=20))
    await host.list_tools(server)
    begun = time.monotonic()
    outcome = await host.call(server, "slow", sent({"seconds": 30, "name": f"timeout {way}"}))
    assert time.monotonic() - begun < 1.5
    assert (outcome.is_error, outcome.outcome_unknown) == (True, True)
    if way in HEARS:
        await upstream.until_noted(f"slow cancelled timeout {way}")
    assert (await host.call(server, "echo", sent({"text": "next"}))).text == "next"


async def test_a_call_keeps_to_its_callers_deadline(host: McpHost, upstream: Upstream) -> None:
    server = upstream.server("modern")
    await host.list_tools(server)
    begun = time.monotonic()
    deadline = asyncio.get_running_loop().time() + 0.3
    assert (await host.call(server, "slow", sent({"seconds": 30}), deadline=deadline)).outcome_unknown
    assert time.monotonic() - begun < 1


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_who_leaves_is_free_at_once_and_the_server_is_told(host: McpHost, upstream: Upstream, way: str) -> None:
    server = upstream.server(way)
    calls = [
        asyncio.create_task(host.call(server, "slow", sent({"seconds": 30, "name": f"left {way} {index}"})))
        for index in range(3)
    ]
    stays = asyncio.create_task(host.call(server, "slow", sent({"seconds": 0.6, "name": f"stays {way}"})))
    for index in range(3):
        await upstream.until_noted(f"slow begins left {way} {index}")
    await upstream.until_noted(f"slow begins stays {way}")
    begun = time.monotonic()
    for call in calls:
        call.cancel()
    done, _ = await asyncio.wait(calls)
    assert time.monotonic() - begun < 0.25
    assert all(call.cancelled() for call in done)
    if way in HEARS:
        for index in range(3):
            await upstream.until_noted(f"slow cancelled left {way} {index}")
    assert (await stays).text == "done"


async def test_calls_beyond_the_places_of_a_server_wait_in_order(host: McpHost, upstream: Upstream) -> None:
    server = upstream.server("modern", concurrent=2)
    names = [f"place {index}" for index in range(6)]
    begun = time.monotonic()
    outcomes = await asyncio.gather(
        *(host.call(server, "slow", sent({"seconds": 0.2, "name": name})) for name in names)
    )
    assert [outcome.text for outcome in outcomes] == ["done"] * 6
    assert 0.6 <= time.monotonic() - begun < 3
    begins = upstream.noted("slow begins place")
    assert [sorted(begins[at : at + 2]) for at in (0, 2, 4)] == [
        [f"slow begins {name}" for name in names[at : at + 2]] for at in (0, 2, 4)
    ]


async def test_who_waits_for_a_place_too_long_was_never_sent(host: McpHost, upstream: Upstream) -> None:
    server = upstream.server("modern", concurrent=1)
    first = asyncio.create_task(host.call(server, "slow", sent({"seconds": 1, "name": "holds"})))
    await upstream.until_noted("slow begins holds")
    late = asyncio.get_running_loop().time() + 0.2
    outcome = await host.call(server, "slow", sent({"seconds": 0, "name": "waits"}), deadline=late)
    assert (outcome.is_error, outcome.outcome_unknown) == (True, False)
    waiting = asyncio.create_task(host.call(server, "slow", sent({"seconds": 0, "name": "leaves"})))
    await asyncio.sleep(0.05)
    waiting.cancel()
    assert (await first).text == "done"
    assert (await host.call(server, "echo", sent({"text": "free again"}))).text == "free again"
    assert upstream.noted("waits") == upstream.noted("leaves") == []


@pytest.mark.parametrize("way", ["modern", "modern_json", "legacy", "legacy_json", "sse"])
async def test_a_server_that_dies_in_a_call_leaves_an_unknown_outcome_and_one_attempt(
    host: McpHost, tmp_path: Path, way: str
) -> None:
    with start_upstream(tmp_path) as (_, upstream):
        server = upstream.server(way)
        assert (await host.call(server, "echo", sent({"text": "before"}))).text == "before"
        begun = time.monotonic()
        outcome = await host.call(server, "die", sent({}))
        assert (outcome.is_error, outcome.outcome_unknown) == (True, True)
        assert time.monotonic() - begun < 5
        assert len(upstream.noted("die")) == 1
        # Its other connections fall one by one; a call on one of them would be as unknown.
        await asyncio.sleep(0.1)
        after = await host.call(server, "echo", sent({"text": "after"}))
        assert (after.is_error, after.outcome_unknown) == (True, False), after.text


@pytest.mark.slow
async def test_a_process_that_dies_is_started_again_for_the_next_call(host: McpHost, upstream: Upstream) -> None:
    server = upstream.server("stdio")
    outcome = await host.call(server, "die", sent({"name": "stdio"}))
    assert (outcome.is_error, outcome.outcome_unknown) == (True, True)
    assert upstream.noted("die stdio") == ["die stdio"]
    assert (await host.call(server, "echo", sent({"text": "again"}))).text == "again"


@pytest.mark.slow
async def test_a_server_that_came_back_elsewhere_in_time_is_found(host: McpHost, tmp_path: Path) -> None:
    """What was open to the old process is of no use; nothing was sent, so the call is made anew."""
    with start_upstream(tmp_path) as (old, upstream):
        server = upstream.server("legacy")
        await host.list_tools(server)
        old.kill()
        old.wait()
        assert (await host.call(server, "echo", sent({"text": "gone"}))).is_error
        with start_upstream(tmp_path) as (_, successor):
            moved = replace(server, url=successor.urls["legacy"])
            assert (await host.call(moved, "echo", sent({"text": "back"}))).text == "back"


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
