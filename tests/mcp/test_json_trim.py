"""Large answers are read without what nobody reads, and the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import examples
from tests.fakes.wire import Seen, Step, Write
from tests.mcp.arguments import sent
from tests.mcp.hostile import EVENTS, Hostile, event, message, plain
from unisono.mcp import McpHost, McpLimits
from unisono.mcp.json_trim import QUICK_TOKENS, TrimLimitReached, children, trim_in_thread

LIMITS = McpLimits()


def result(**fields: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "result": fields}).encode()


def part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


ROWS = [[number, {"a, b": "}]"}] for number in range(QUICK_TOKENS)]
PARTS = [part(f'"{number}", [{{') for number in range(QUICK_TOKENS)]
TOOLS = [{"name": f"t{n}", "inputSchema": {"type": "object", "properties": {}}} for n in range(QUICK_TOKENS // 10)]

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "little stays": ({"content": [part("x,{[" * 1000)]}, {"content": [part("x,{[" * 1000)]}),
    "text of many marks stays": (
        {"content": [part("a,{[" * QUICK_TOKENS)]},
        {"content": [part("a,{[" * QUICK_TOKENS)]},
    ),
    "JSON beside its text is left out": (
        {"structuredContent": {"rows": ROWS}, "content": [part("rows")], "isError": False},
        {"content": [part("rows")], "isError": False},
    ),
    "what is beside both is left out": ({"_meta": {"rows": ROWS}, "content": [part("x")]}, {"content": [part("x")]}),
    "a list of tools stays": ({"tools": TOOLS, "nextCursor": "2"}, {"tools": TOOLS, "nextCursor": "2"}),
    "a part that is no part is left out": (
        {"content": [part("a"), {**part("b"), "_meta": {"rows": ROWS}}, part("c")]},
        {
            "content": [
                part("a"),
                part("c"),
                part("[truncated: the result has 3 parts; only the first ones are included]"),
            ]
        },
    ),
    "endless parts": (
        {"content": PARTS},
        {
            "content": [
                *PARTS[: LIMITS.entries],
                part(f"[truncated: the result has {QUICK_TOKENS} parts; only the first ones are included]"),
            ]
        },
    ),
}


@pytest.mark.parametrize(("before", "after"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("indent", [None, 1], ids=["close", "wide"])
def test_what_is_over_the_bounds_is_left_out(before: dict[str, Any], after: dict[str, Any], indent: int | None) -> None:
    data = json.dumps({"jsonrpc": "2.0", "id": 1, "result": before}, indent=indent).encode()
    assert json.loads(trim_in_thread(data, LIMITS)) == {"jsonrpc": "2.0", "id": 1, "result": after}


def test_of_json_without_text_the_beginning_stays_as_text() -> None:
    light = json.loads(trim_in_thread(result(structuredContent={"rows": ROWS}, content=[]), LIMITS))
    [only] = light["result"]["content"]
    assert only["text"].startswith('{"rows": [[0, {"a, b": "}]"}], [1,')
    assert "structuredContent" not in light["result"]
    assert len(only["text"]) <= LIMITS.output_bytes


NO_MESSAGES = {
    "cut off": b'{"result":{"content":[' + b'{"a":1},' * QUICK_TOKENS,
    "closed too often": b"]" * 9 + b"," * (2 * QUICK_TOKENS),
    "no object": b"," * (2 * QUICK_TOKENS),
    "a string without an end": b'{"result":"' + b'\\",' * (20 * QUICK_TOKENS),
}


@pytest.mark.parametrize("data", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_what_is_no_json_stays_none_and_takes_no_time(data: bytes) -> None:
    begun = time.process_time()
    with pytest.raises(ValueError):
        json.loads(trim_in_thread(data, LIMITS))
    assert time.process_time() - begun < 2


def test_more_than_is_looked_through_is_refused() -> None:
    with pytest.raises(TrimLimitReached):
        trim_in_thread(result(_meta=[[]] * QUICK_TOKENS), McpLimits(looked_through=QUICK_TOKENS))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)


CONTAINERS = st.lists(VALUES, max_size=6) | st.dictionaries(st.text(max_size=6), VALUES, max_size=6)


@given(CONTAINERS, st.sampled_from([None, 2]))
@settings(max_examples=examples(150), deadline=None)
def test_whatever_stands_in_a_container_is_found_as_it_is_written(value: Any, indent: int | None) -> None:
    looked = children(json.dumps(value, indent=indent).encode(), 10_000)
    assert looked is not None
    found, count = looked
    assert count >= len(found) == len(value)
    if isinstance(value, dict):
        assert {json.loads(each.key): json.loads(each.value) for each in found} == value
    else:
        assert [json.loads(each.value) for each in found] == value


BODIES = {
    "rows": {"content": [], "structuredContent": {"rows": [[n, {"a": 1}] for n in range(60_000)]}},
    "parts": {"content": [part("x" * 30) for _ in range(60_000)]},
    "nothing in it": {"content": [{**part("x"), "_meta": {"a": [{}] * 1_900_000}}]},
    "one text": {"content": [part("x" * 7_900_000)]},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["json", "events"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_others_go_on_while_a_large_answer_is_read(host: McpHost, way: str, body: dict[str, Any]) -> None:
    written = json.dumps(body).encode()

    def act(seen: Seen) -> list[Step]:
        data = message(id=seen.json["id"], result=0)[:-2] + written + b"}"
        return [plain(200, data)] if way == "json" else [Write(EVENTS), event(data)]

    async with Hostile(act) as hostile:
        await host.list_tools(hostile.server())
        worst = 0.0
        ended = asyncio.Event()

        async def tick() -> None:
            nonlocal worst
            last = time.thread_time()
            while not ended.is_set():
                await asyncio.sleep(0.001)
                # What this thread itself has worked: what others took meanwhile is no stall of the loop.
                now = time.thread_time()
                worst, last = max(worst, now - last), now

        ticking = asyncio.create_task(tick())
        outcome = await host.call(hostile.server(), "act", sent({}))
        ended.set()
        await ticking
    assert outcome.text
    assert not outcome.outcome_unknown
    assert worst < 0.15
