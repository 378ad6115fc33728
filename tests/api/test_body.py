"""Limits of JSON request bodies: syntax, depth, number of values, tokenizable text."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from unisono.api.body import (
    MAX_DEPTH,
    MAX_RUN,
    DirectRequest,
    check_depth,
    check_runs,
    has_piece_of_length,
    read_json,
    to_object,
    too_many_values,
)
from unisono.api.body_limits import ARRIVED_BYTES
from unisono.api.error_responses import ClientGone
from unisono.errors import InvalidRequest


async def read(body: bytes) -> dict[str, Any]:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return await read_json(Request({"type": "http", "method": "POST", "headers": []}, receive))


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not valid JSON"),
    "truncated": (b'{"a":', "not valid JSON"),
    "list": (b"[]", "must be a JSON object"),
    "string": (b'"a"', "must be a JSON object"),
    "NaN": (b'{"a":NaN}', "not valid JSON"),
    "infinite number": (b'{"a":1e400}', "not valid JSON"),
    "not UTF-8": (b'{"a":"\xff"}', "not valid JSON"),
    "a lone surrogate": (b'{"a":"\\ud800"}', "not valid JSON"),
    "a comment": (b"{} // x", "not valid JSON"),
    "too deep": (nested(MAX_DEPTH + 1), "nested"),
    "too deep for the parser": (b"[" * 100_000, "not valid JSON"),
    "millions of objects": (b'{"a":[' + b"{}," * 3_000_000 + b"{}]}", "JSON values"),
    "millions of strings": (b'{"a":[' + b'"",' * 3_000_000 + b'""]}', "JSON values"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "byte order mark"),
    "UTF-16": ("{}".encode("utf-16"), "UTF-16"),
    "gzip": (b"\x1f\x8b\x08\x00", "compressed"),
    "infinity": (b'{"a":-Infinity}', "NaN and Infinity"),
    "duplicate name": (b'{"a":1,"b":2,"a":1}', "'a' occurs twice"),
    "duplicate name in a nested object": (b'{"a":[{"b":{"c":1,"c":1}}]}', "'c' occurs twice"),
    "duplicate name, once escaped": (b'{"a":1,"\\u0061":1}', "'a' occurs twice"),
    "duplicate name that is a colon": (b'{":":":\\\\",":" : "\\":"}', "':' occurs twice"),
    "duplicate empty name": (b'{"":1,"":1}', "'' occurs twice"),
    "duplicate name before a long number": (b'{"a":1,"a":1.' + b"9" * 10**6 + b"}", "'a' occurs twice"),
    "ten thousand duplicate names": (b'{"a":[' + b'{"x":1,"x":1},' * 10**4 + b"1]}", "'x' occurs twice"),
    "a run of spaces": (orjson.dumps({"a": {"b": [" " * MAX_RUN]}}), "'a.b.0'"),
    "a run of one letter": (orjson.dumps({"a": "x" * MAX_RUN}), "cannot be tokenized"),
}


@pytest.mark.parametrize(("body", "message"), BAD.values(), ids=BAD)
async def test_an_invalid_body_is_refused_quickly(body: bytes, message: str) -> None:
    started = time.perf_counter()
    with pytest.raises(InvalidRequest, match=message):
        await read(body)
    assert time.perf_counter() - started < 10


DEEPEST: dict[str, Any] = orjson.loads(nested(MAX_DEPTH))
DEEP: dict[str, tuple[dict[str, Any], str]] = {
    "one field": ({"model": "m", "a": orjson.loads(nested(MAX_DEPTH))}, "a.a.0.0.0.0.0.0"),
    "a tool": (
        {"x": [[]], "tools": [{}, {"parameters": orjson.loads(nested(MAX_DEPTH))}]},
        "tools.1.parameters.a.0.0.0.0",
    ),
    "long names": ({"n" * 100: {"m" * 100: orjson.loads(nested(MAX_DEPTH))}}, f"{'n' * 64}.{'m' * 64}.a.0.0.0.0.0"),
}


@pytest.mark.parametrize(("body", "param"), DEEP.values(), ids=DEEP)
def test_the_error_for_deep_nesting_names_the_field_and_the_limit(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=f"at most {MAX_DEPTH} levels. Reduce") as refused:
        to_object(orjson.dumps(body))
    assert refused.value.param == param


@pytest.mark.slow
async def test_the_event_loop_is_not_blocked_by_a_large_body() -> None:
    body = orjson.dumps({"a": [{"b": [1]} for _ in range(100_000)]})
    iterations = 0
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(read(body))
        while not reading.done():
            await asyncio.sleep(0.001)
            iterations += 1
    assert len(reading.result()["a"]) == 100_000
    assert iterations > 5


GOOD: dict[str, dict[str, Any]] = {
    "empty": {},
    "maximum depth": orjson.loads(nested(MAX_DEPTH)),
    "a hundred thousand spaces": {"a": " " * 100_000},
    "a hundred thousand Han characters": {"a": "中" * 100_000},
    "longest permitted run": {"a": "x" * (MAX_RUN - 1)},
    "megabytes of words": {"a": "word " * 500_000},
    "megabytes of digits": {"a": "0123456789" * 200_000},
    "string full of commas, brackets and quotes": {"a": '{"x",[\\"y\\"],\\\\}' * 200_000},
}


@pytest.mark.parametrize("value", GOOD.values(), ids=GOOD)
async def test_a_large_valid_body_is_accepted_quickly(value: dict[str, Any]) -> None:
    started = time.perf_counter()
    assert await read(orjson.dumps(value)) == value
    assert time.perf_counter() - started < 10


def longest_run(text: str, is_separator: Any) -> int:
    best = run = 0
    for letter in text:
        run = 0 if is_separator(letter) else run + 1
        best = max(best, run)
    return best


@given(st.text(alphabet="ab \t\n1/_!é中", max_size=60), st.integers(1, 12))
@example("aaaa", 4)
@example("aaa", 4)
@example("\n/\n/", 4)
@example(" " * 7, 3)
def test_runs_are_measured_exactly(text: str, length: int) -> None:
    runs = (
        longest_run(text, lambda letter: not letter.isalpha()),
        longest_run(text, lambda letter: letter.isspace() or letter.isalnum()),
        longest_run(text, lambda letter: not (letter.isspace() or letter == "/")),
    )
    assert has_piece_of_length(text, length) == (max(runs) >= length)


@given(st.recursive(st.none() | st.text(max_size=3), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_ordinary_bodies_are_within_the_limits(value: Any) -> None:
    body = {"value": value}
    assert not too_many_values(orjson.dumps(body))
    check_depth(body)
    check_runs(body)


json_values = st.recursive(
    st.one_of(st.none(), st.integers(-9, 9), st.text('a:"\\{}[],', max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text('a:"\\', max_size=2), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text('a:"\\', max_size=2), json_values, max_size=4), st.booleans())
def test_only_duplicate_names_are_refused(value: dict[str, Any], spaced: bool) -> None:
    body = json.dumps(value, separators=(" , ", " : ") if spaced else (",", ":")).encode()
    assert to_object(body) == value
    for name in value:
        duplicate = json.dumps({name: 1})[1:-1].encode()
        with pytest.raises(InvalidRequest, match="occurs twice") as refused:
            to_object(body[:-1] + b"," + duplicate + b"}")
        assert refused.value.param == name


async def read_pieces(*pieces: bytes, is_whole: bool = True) -> bytes:
    """Read a body that arrives in pieces, twice, as the routes do."""
    messages: list[Message] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages.append({"type": "http.request"} if is_whole else {"type": "http.disconnect"})
    incoming = iter(messages)

    async def receive() -> Message:
        return next(incoming)

    request = DirectRequest({"type": "http", "method": "POST", "headers": []}, receive)
    body = await request.body()
    assert await request.body() is body
    return body


@pytest.mark.parametrize("pieces", [(), (b"{}",), (b"{", b"", b"}")], ids=["empty", "one piece", "several pieces"])
async def test_a_body_in_pieces_is_read_once(pieces: tuple[bytes, ...]) -> None:
    assert await read_pieces(*pieces) == b"".join(pieces)


async def test_a_body_without_its_end_is_no_body() -> None:
    with pytest.raises(ClientDisconnect):
        await read_pieces(b"{", is_whole=False)


@pytest.mark.parametrize(("state", "error"), [({ARRIVED_BYTES: 2}, ClientGone), ({}, InvalidRequest)])
async def test_a_client_that_leaves_after_its_whole_body_sent_no_faulty_request(
    state: dict[str, Any], error: type[Exception]
) -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(error):
        await read_json(DirectRequest({"type": "http", "method": "POST", "headers": [], "state": state}, receive))
