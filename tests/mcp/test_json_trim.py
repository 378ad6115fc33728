"""Tests of trimming large answers without blocking the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from httpx2 import EventSource
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import examples
from tests.fakes.wire import Seen, Step, Write
from tests.mcp.arguments import sent
from tests.mcp.hostile import EVENTS, Hostile, event, message, plain
from unisono.mcp import McpHost, McpLimits
from unisono.mcp.messages import Exchange
from unisono.mcp.response_filter import (
    OFF_LOOP_BYTES,
    QUICK_TOKENS,
    EventStreamBody,
    TrimLimitReached,
    children,
    fields_of,
    trim,
    trim_in_thread,
)

LIMITS = McpLimits()


def result(**fields: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "result": fields}).encode()


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


ROWS = [[number, {"a, b": "}]"}] for number in range(QUICK_TOKENS)]
PARTS = [text_part(f'"{number}", [{{') for number in range(QUICK_TOKENS)]
TOOLS = [{"name": f"t{n}", "inputSchema": {"type": "object", "properties": {}}} for n in range(QUICK_TOKENS // 10)]

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "small answer unchanged": ({"content": [text_part("x,{[" * 1000)]}, {"content": [text_part("x,{[" * 1000)]}),
    "text with many delimiters unchanged": (
        {"content": [text_part("a,{[" * QUICK_TOKENS)]},
        {"content": [text_part("a,{[" * QUICK_TOKENS)]},
    ),
    "structured content beside text dropped": (
        {"structuredContent": {"rows": ROWS}, "content": [text_part("rows")], "isError": False},
        {"content": [text_part("rows")], "isError": False},
    ),
    "metadata dropped": ({"_meta": {"rows": ROWS}, "content": [text_part("x")]}, {"content": [text_part("x")]}),
    "tool list unchanged": ({"tools": TOOLS, "nextCursor": "2"}, {"tools": TOOLS, "nextCursor": "2"}),
    "part with metadata dropped": (
        {"content": [text_part("a"), {**text_part("b"), "_meta": {"rows": ROWS}}, text_part("c")]},
        {
            "content": [
                text_part("a"),
                text_part("c"),
                text_part("[truncated: the result has 3 parts; only the first ones are included]"),
            ]
        },
    ),
    "too many parts": (
        {"content": PARTS},
        {
            "content": [
                *PARTS[: LIMITS.entries],
                text_part(f"[truncated: the result has {QUICK_TOKENS} parts; only the first ones are included]"),
            ]
        },
    ),
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("before", "after"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("indent", [None, 1], ids=["compact", "indented"])
def test_parts_over_the_limits_are_dropped(before: dict[str, Any], after: dict[str, Any], indent: int | None) -> None:
    data = json.dumps({"jsonrpc": "2.0", "id": 1, "result": before}, indent=indent).encode()
    assert json.loads(trim_in_thread(data, LIMITS)) == {"jsonrpc": "2.0", "id": 1, "result": after}


def test_beginning_of_structured_content_without_text_becomes_text() -> None:
    trimmed = json.loads(trim_in_thread(result(structuredContent={"rows": ROWS}, content=[]), LIMITS))
    [only] = trimmed["result"]["content"]
    assert only["text"].startswith('{"rows": [[0, {"a, b": "}]"}], [1,')
    assert "structuredContent" not in trimmed["result"]
    assert len(only["text"]) <= LIMITS.output_bytes


INVALID_MESSAGES = {
    "truncated": b'{"result":{"content":[' + b'{"a":1},' * QUICK_TOKENS,
    "extra brackets": b"]" * 9 + b"," * (2 * QUICK_TOKENS),
    "not an object": b"," * (2 * QUICK_TOKENS),
    "unterminated string": b'{"result":"' + b'\\",' * (20 * QUICK_TOKENS),
}


@pytest.mark.parametrize("data", INVALID_MESSAGES.values(), ids=INVALID_MESSAGES)
def test_invalid_json_stays_invalid_and_takes_little_time(data: bytes) -> None:
    started = time.process_time()
    with pytest.raises(ValueError):
        json.loads(trim_in_thread(data, LIMITS))
    assert time.process_time() - started < 2


def test_scan_limit_is_enforced() -> None:
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
def test_children_of_a_container_are_found_unchanged(value: Any, indent: int | None) -> None:
    scanned = children(json.dumps(value, indent=indent).encode(), 10_000)
    assert scanned is not None
    items, count = scanned
    assert count >= len(items) == len(value)
    if isinstance(value, dict):
        assert {json.loads(each.key): json.loads(each.value) for each in items} == value
    else:
        assert [json.loads(each.value) for each in items] == value


BODIES = {
    "rows": {"content": [], "structuredContent": {"rows": [[n, {"a": 1}] for n in range(60_000)]}},
    "parts": {"content": [text_part("x" * 30) for _ in range(60_000)]},
    "empty metadata": {"content": [{**text_part("x"), "_meta": {"a": [{}] * 1_900_000}}]},
    "single text": {"content": [text_part("x" * 7_900_000)]},
}


@pytest.mark.slow
@pytest.mark.parametrize("framing", ["json", "events"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_reading_a_large_answer_does_not_block_the_loop(
    host: McpHost, framing: str, body: dict[str, Any]
) -> None:
    encoded = json.dumps(body).encode()

    def act(seen: Seen) -> list[Step]:
        data = message(id=seen.json["id"], result=0)[:-2] + encoded + b"}"
        return [plain(200, data)] if framing == "json" else [Write(EVENTS), event(data)]

    async with Hostile(act) as hostile:
        await host.list_tools(hostile.server())
        longest = 0.0
        is_finished = asyncio.Event()

        async def measure() -> None:
            nonlocal longest
            last = time.thread_time()
            while not is_finished.is_set():
                await asyncio.sleep(0.001)
                # CPU time of this thread: time that other processes took is no blocking of the loop.
                now = time.thread_time()
                longest, last = max(longest, now - last), now

        measuring = asyncio.create_task(measure())
        outcome = await host.call(hostile.server(), "act", sent({}))
        is_finished.set()
        await measuring
    assert outcome.text
    assert not outcome.outcome_unknown
    assert longest < 0.15


class _Read(httpx2.AsyncByteStream):
    """Body of a response that arrives in one read."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._data


# case: (bytes of one read, minimum number of turns of the event loop during parsing)
FLOODS = {
    "empty events": (b"\n\n" * 16_000, 500),
    "events without a message": (b"data:\n\n" * 8_000, 250),
    "events of many comments": ((b":\n" * 30_000 + b"\n") * 20, 8),
}


@pytest.mark.parametrize(("data", "least"), FLOODS.values(), ids=FLOODS)
async def test_events_of_one_read_do_not_block_the_event_loop(data: bytes, least: int) -> None:
    body = EventStreamBody(_Read(data), Exchange(), McpLimits())

    async def parse() -> None:
        request, headers = httpx2.Request("POST", "http://a.example/"), {"content-type": "text/event-stream"}
        async for _ in EventSource(httpx2.Response(200, headers=headers, stream=body, request=request)):
            pass

    parsing = asyncio.create_task(parse())
    turns = 0
    while not parsing.done():
        await asyncio.sleep(0)
        turns += 1
    await parsing
    assert turns > least


# case: (event, the lines and the data that are passed on)
LARGE_EVENTS = {
    "comments and unknown fields": (b":\n" * 5 + b"a: b\ndata: 1\n\n", ([], b"1")),
    "repeated fields": (b"id: 1\nevent: x\nid: 2\ndata:1\n\n", ([b"id: 2", b"event: x"], b"1")),
    "several lines of data": (b"data: [1,\r\ndata: 2]\r\n\r\n", ([], b"[1, 2]")),
}


@pytest.mark.parametrize(("event", "fields"), LARGE_EVENTS.values(), ids=LARGE_EVENTS)
def test_large_event_is_passed_on_with_one_line_for_each_field(event: bytes, fields: tuple[list[bytes], bytes]) -> None:
    assert fields_of(event) == fields


# JSON text of a server, and the JSON text without lone surrogates.
SURROGATES = {
    "no surrogate": (rb'"a\u00e4\ufffd"', rb'"a\u00e4\ufffd"'),
    "pair": (rb'"\ud83d\uDE00"', rb'"\ud83d\uDE00"'),
    "high surrogate": (rb'"a\ud83db"', rb'"a\ufffdb"'),
    "low surrogate": (rb'"\uDE00"', rb'"\ufffd"'),
    "high surrogate before a pair": (rb'"\ud83d\ud83d\ude00"', rb'"\ufffd\ud83d\ude00"'),
    "low surrogate after a pair": (rb'"\ud83d\ude00\ude00"', rb'"\ud83d\ude00\ufffd"'),
    "escaped backslash": (rb'"\\ud83d"', rb'"\\ud83d"'),
    "surrogate after an escaped backslash": (rb'"\\\ud83d"', rb'"\\\ufffd"'),
    "unpaired surrogates": (rb'"\ud83d\\ude00"', rb'"\ufffd\\ude00"'),
}


@pytest.mark.parametrize(("before", "after"), SURROGATES.values(), ids=SURROGATES)
@pytest.mark.parametrize("spaces", [0, OFF_LOOP_BYTES])
async def test_lone_surrogates_are_replaced(before: bytes, after: bytes, spaces: int) -> None:
    assert await trim(before + b" " * spaces, LIMITS) == after + b" " * spaces
