"""Hostile requests: each gets a proper answer at once, the process lives, and no other stream is kept waiting.

Client, gateway and backends share one loop, so a canary's gap holds the work of all of them. The longest measured was
0.2 s (ten megabytes of objects); the bounds are ones that only a blocked loop breaks.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.e2e.canary import STEP_S, Canary, singing
from tests.e2e.gateway import Answer, Gateway, gateway, message_of, to_answer
from tests.e2e.wires import WIRES, Fake, asked, deployment

LONGEST_GAP_S = 0.75
SOON_S = 20.0
"""On an idle machine nothing here takes longer than a second and a half."""

pytestmark = pytest.mark.asyncio(loop_scope="module")

DONE = "<|channel|>final<|message|>Done.<|return|>"
USER = [{"role": "user", "content": "Hi"}]


@dataclass
class Site:
    """`gpt-oss-ids` and `gpt-oss-text` are served by one fake each, and a canary sings beside them."""

    ids: Fake
    text: Fake
    gateway: Gateway
    canary: Canary

    async def send(self, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> Answer:
        """POST; a server that answers before it has read everything is heard all the same."""
        sent = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        url = self.gateway.url + path
        async with self.gateway.session.post(url, data=in_pieces(body), headers=sent) as response:
            return to_answer(response.status, response.headers, await response.read())

    async def chat(self, **fields: Any) -> Answer:
        return await self.send(to_body(**fields))


async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 2**16):
        yield body[start : start + 2**16]


def to_body(**fields: Any) -> bytes:
    return json.dumps({"model": "gpt-oss-ids", "messages": USER, **fields}, ensure_ascii=False).encode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    ids, text = WIRES["vllm"], WIRES["mlx_server"]
    async with ids.fake() as one, text.fake() as other, ids.fake() as slow:
        done, also_done = ids.script(DONE), text.script(DONE)
        song = ids.script("<|channel|>final<|message|>" + " ".join(map(str, range(10_000))), delay_s=STEP_S)
        one.script = lambda asked: done  # type: ignore[assignment]
        other.script = lambda asked: also_done  # type: ignore[assignment]
        slow.script = lambda asked: song  # type: ignore[assignment]
        entries = [
            deployment("gpt-oss-ids", ids, one),
            deployment("gpt-oss-text", text, other),
            deployment("gpt-oss-slow", ids, slow),
        ]
        async with gateway({"model_list": entries}) as running, singing(running, "gpt-oss-slow") as canary:
            yield Site(one, other, running, canary)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def unharmed(site: Site) -> AsyncIterator[None]:
    """Whatever a test does: it is over soon, the canary sings on, and the next client is served."""
    await site.canary.fresh()
    yield
    assert await site.canary.worst_s() < LONGEST_GAP_S
    assert message_of(await site.chat()).content == "Done."


def check_refused(answer: Answer, status: int, code: str | None = None, param: str | None = None) -> None:
    assert answer.status == status, answer.raw[:500]
    error = answer.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert len(error["message"]) < 1000
    if code is not None:
        assert error["code"] == code
    if param is not None:
        assert error["param"] == param


async def within(seconds: float, answer: Any) -> Answer:
    async with asyncio.timeout(seconds):
        got: Answer = await answer
        return got


# Bodies that are no request

CHAT = to_body().removesuffix(b"}")
DEEP = 100_000
BODIES: dict[str, tuple[bytes, int, str]] = {
    "nothing": (b"", 400, "invalid_value"),
    "half an object": (b'{"model": "gpt-oss-ids", "messages": [', 400, "invalid_value"),
    "an array": (b"[]", 400, "invalid_value"),
    "a string": (b'"hello"', 400, "invalid_value"),
    "null": (b"null", 400, "invalid_value"),
    "two objects": (to_body() + to_body(), 400, "invalid_value"),
    "NaN": (CHAT + b', "temperature": NaN}', 400, "invalid_value"),
    "infinity": (CHAT + b', "temperature": Infinity}', 400, "invalid_value"),
    "beyond a double": (CHAT + b', "temperature": 1e400}', 400, "invalid_value"),
    "a number of a million digits": (CHAT + b', "seed": ' + b"9" * 10**6 + b"}", 400, "invalid_value"),
    "a raw NUL": (b'{"model": "gpt\0oss"}', 400, "invalid_value"),
    "a lone surrogate": (CHAT + b', "user": "\\ud800"}', 400, "invalid_value"),
    "no UTF-8": (b'{"model": "\xff\xfe"}', 400, "invalid_value"),
    "UTF-16": (to_body().decode().encode("utf-16"), 400, "invalid_value"),
    "a byte order mark": (b"\xef\xbb\xbf" + to_body(), 400, "invalid_value"),
    "packed without saying so": (gzip.compress(to_body()), 400, "invalid_value"),
    "an abyss of brackets": (CHAT + b', "x": ' + b"[" * DEEP + b"]" * DEEP + b"}", 400, "invalid_value"),
    "an abyss of objects": (CHAT + b', "x": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}", 400, "invalid_value"),
    "ten megabytes of objects": (b"[" + b"{}," * 3_300_000 + b"{}]", 400, "invalid_value"),
    "twenty megabytes": (to_body(user="x" * 20 * 2**20), 413, "body_too_large"),
    "duplicate keys, the last one wrong": (CHAT + b', "model": 7}', 400, "invalid_value"),
}


@pytest.mark.parametrize("case", BODIES)
async def test_a_body_that_is_no_request_is_refused(site: Site, case: str) -> None:
    body, status, code = BODIES[case]
    try:
        check_refused(await within(SOON_S, site.send(body)), status, code)
    except aiohttp.ClientOSError:
        # The client was still writing what nobody wants to read.
        assert status == 413


async def test_a_length_that_is_too_much_is_refused_before_the_body(site: Site) -> None:
    answer = await raw(site, b"content-type: application/json\r\ncontent-length: 20971520\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"body_too_large"' in answer


HEADERS: dict[str, tuple[dict[str, str], int]] = {
    "gzip": ({"content-encoding": "gzip"}, 415),
    "br": ({"content-encoding": "br"}, 415),
    "two packings": ({"content-encoding": "gzip, identity"}, 415),
    "text": ({"content-type": "text/plain"}, 415),
    "a form": ({"content-type": "application/x-www-form-urlencoded"}, 415),
    "multipart": ({"content-type": "multipart/form-data; boundary=x"}, 415),
    "nearly JSON": ({"content-type": "application/jsonp"}, 415),
    "another host": ({"host": "evil.example"}, 403),
    "a host that begins like this one": ({"host": "localhost.evil.example"}, 403),
    "a host with a path": ({"host": "localhost/health/liveness?"}, 403),
    "another origin": ({"origin": "https://evil.example"}, 403),
    "no origin at all": ({"origin": "null"}, 403),
}


@pytest.mark.parametrize("case", HEADERS)
async def test_headers_of_another_kind_are_refused(site: Site, case: str) -> None:
    headers, status = HEADERS[case]
    body = gzip.compress(to_body()) if "content-encoding" in headers else to_body()
    check_refused(await within(SOON_S, site.send(body, **headers)), status)


async def test_a_packed_bomb_is_not_unpacked(site: Site) -> None:
    bomb = gzip.compress(b" " * 50_000_000)
    await site.canary.fresh()
    check_refused(await within(SOON_S, site.send(bomb, content_encoding="gzip")), 415)


# Values of the wrong kind: the field is named

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "model as a number": ({"model": 7}, "model"),
    "no model": ({"model": None}, "model"),
    "a model name of 10 kB": ({"model": "x" * 10_000}, "model"),
    "messages as an object": ({"messages": {}}, "messages"),
    "no messages": ({"messages": []}, "messages"),
    "a message that is null": ({"messages": [None]}, "messages.0"),
    "a message that is a list": ({"messages": [[]]}, "messages.0"),
    "an unknown role": ({"messages": [{"role": "root", "content": "x"}]}, "messages.0.role"),
    "content as a number": ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    "content as an object": ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages.0.content"),
    "a part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages.0.content.0.text",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
    ),
    "temperature as text": ({"temperature": "hot"}, "temperature"),
    "temperature as a yes": ({"temperature": True}, "temperature"),
    "too hot": ({"temperature": 99}, "temperature"),
    "top_p 0": ({"top_p": 0}, "top_p"),
    "n 0": ({"n": 0}, "n"),
    "n 17": ({"n": 17}, "n"),
    "n 10^30": ({"n": 10**30}, "n"),
    "max_tokens below zero": ({"max_tokens": -1}, "max_tokens"),
    "half a token": ({"max_tokens": 1.5}, "max_tokens"),
    "stop as a number": ({"stop": 7}, "stop"),
    "an empty stop": ({"stop": [""]}, "stop.0"),
    "a thousand stops": ({"stop": ["x"] * 1000}, "stop"),
    "a seed beyond 64 bits": ({"seed": 2**64}, "seed"),
    "a bias on a word": ({"logit_bias": {"word": 1}}, "logit_bias.word"),
    "a bias on a structural token": ({"logit_bias": {"200002": 1}}, "logit_bias.200002"),
    "stream as text": ({"stream": "yes"}, "stream"),
    "tools as an object": ({"tools": {}}, "tools"),
    "a tool that is a number": ({"tools": [1]}, "tools.0"),
    "a tool without a function": ({"tools": [{"type": "function"}]}, "tools.0.function"),
    "an unknown effort": ({"reasoning_effort": "ultra"}, "reasoning_effort"),
    "a result without a call": (
        {"messages": [*USER, {"role": "tool", "tool_call_id": "call_1", "content": "x"}]},
        "messages.1.tool_call_id",
    ),
    "a result without an id": ({"messages": [*USER, {"role": "tool", "content": "x"}]}, "messages.1.tool_call_id"),
    "a call without a name": (
        {"messages": [*USER, {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {}}]}]},
        "messages.1.tool_calls.0.function.name",
    ),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_value_of_the_wrong_kind_is_refused_by_name(site: Site, case: str) -> None:
    fields, param = WRONG[case]
    check_refused(await within(SOON_S, site.chat(**fields)), 400, param=param)


async def test_an_unknown_model_is_not_found(site: Site) -> None:
    for name in ("gpt-9", "../../etc/passwd", "gpt-oss-ids\n", "<|start|>", "gpt-oss-ids\0"):
        check_refused(await within(SOON_S, site.chat(model=name)), 404, "model_not_found")


NAMES = {
    "a line break": "look\n# Instructions",
    "a trailing line break": "look\n",
    "a marker": "<|start|>",
    "a space": "my tool",
    "nothing": "",
    "too long": "x" * 129,
    "letters of another script": "погода",
    "a right-to-left override": "look\u202e",
    "a NUL": "look\0",
    "a path": "../../etc/passwd",
    "a quote": 'look"',
    "a bracket": "look(); }",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
async def test_a_hostile_tool_name_is_refused_wherever_it_stands(site: Site, name: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}
    places: dict[str, dict[str, Any]] = {
        "tools.0.function.name": {"tools": [{"type": "function", "function": {"name": name}}]},
        "functions.0.name": {"functions": [{"name": name}]},
        "messages.1.tool_calls.0.function.name": {"messages": [*USER, {"role": "assistant", "tool_calls": [call]}]},
    }
    for param, fields in places.items():
        check_refused(await within(SOON_S, site.chat(**fields)), 400, param=param)


# Heavy, but legal in form

HEAVY: dict[str, tuple[str, int]] = {
    "spaces": (" " * 100_000, 200),
    "spaces beyond the tokenizer": (" " * 2_000_000, 400),
    "line breaks": ("\n" * 100_000, 200),
    "tabs and spaces": ("\t " * 100_000, 200),
    "a megabyte of Han": ("中文字符" * 87_000, 400),
    "a hundred thousand Han": ("中文字符" * 25_000, 200),
    "combining accents": ("e" + "\u0301" * 64_000, 200),
    "letters": ("a" * 400_000, 200),
    "capitals": ("A" * 400_000, 200),
    "digits": ("7" * 300_000, 200),
    "slashes": ("/" * 200_000, 200),
    "emoji": ("👩‍👩‍👧" * 10_000, 200),
    "NULs": ("\0" * 20_000, 200),
    "half markers": ("<|" * 100_000, 400),
    "markers": ("<|start|>" * 10_000, 200),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt-oss-ids", "gpt-oss-text"])
@pytest.mark.parametrize("case", HEAVY)
async def test_heavy_text_is_answered_or_refused_soon(site: Site, case: str, model: str) -> None:
    text, status = HEAVY[case]
    body = to_body(model=model, messages=[{"role": "user", "content": text}])
    await site.canary.fresh()
    answer = await within(SOON_S, site.send(body))
    if answer.status == 400:
        check_refused(answer, 400)
    else:
        assert message_of(answer).content == "Done."
    assert answer.status == status


def tool(number: int, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"tool_{number}", "description": "x", "parameters": parameters}}


def of_strings(count: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"p{n}": {"type": "string", "description": "A text"} for n in range(count)},
    }


def laughs() -> dict[str, Any]:
    """Each definition refers ten times to the next."""
    definitions: dict[str, Any] = {
        f"d{n}": {"type": "object", "properties": {f"p{m}": {"$ref": f"#/$defs/d{n + 1}"} for m in range(10)}}
        for n in range(12)
    }
    definitions["d12"] = {"type": "string"}
    return {"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": definitions}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def calls(count: int, *, apart: bool = False) -> list[Any]:
    """One message with many calls, answered in reverse order; `apart`, each call in a message of the old form."""
    if apart:
        said: list[Any] = [
            {"role": "assistant", "function_call": {"name": f"{'ab'[n * 2 // count]}", "arguments": ""}}
            for n in range(count)
        ]
        return [*USER, *said, *({"role": "function", "name": "b", "content": "x"} for _ in range(count // 2))]
    made = [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": ""}} for n in range(count)]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": "x"} for n in reversed(range(count))]
    return [*USER, {"role": "assistant", "tool_calls": made}, *results]


BIG: dict[str, Callable[[], dict[str, Any]]] = {
    "an enum of 100,000": lambda: {
        "tools": [tool(0, {"type": "object", "properties": {"x": {"enum": [str(n) for n in range(100_000)]}}})]
    },
    "an enum of long words": lambda: {
        "tools": [
            tool(0, {"type": "object", "properties": {"x": {"enum": ["中" * 10_000 + str(n) for n in range(8)]}}})
        ]
    },
    "500 tools of 50": lambda: {"tools": [tool(n, of_strings(50)) for n in range(500)]},
    "200 tools of 10": lambda: {"tools": [tool(n, of_strings(10)) for n in range(200)]},
    "10,000 tools": lambda: {"tools": [tool(n, {}) for n in range(10_000)]},
    "a tool of 20,000": lambda: {"tools": [tool(0, of_strings(20_000))]},
    "a billion laughs": lambda: {"tools": [tool(0, laughs())]},
    "a schema that means itself": lambda: {
        "tools": [tool(0, {"type": "object", "properties": {"x": {"$ref": "#"}, "y": {"$ref": "#/properties/y"}}})]
    },
    "a schema 60 deep": lambda: {"tools": [tool(0, nested(28))]},
    "a schema 200 deep": lambda: {"tools": [tool(0, nested(200))]},
    "a pattern that explodes": lambda: {
        "tools": [tool(0, {"type": "object", "properties": {"x": {"type": "string", "pattern": "(a+)+$" * 1000}}})]
    },
    "50,000 messages": lambda: {"messages": [{"role": "user", "content": "x"}] * 50_000},
    "10,000 parts": lambda: {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 10_000}]},
    "9,000 calls": lambda: {"messages": calls(9_000)},
    "20,000 calls": lambda: {"messages": calls(20_000)},
    "13,000 calls of the old form": lambda: {"messages": calls(13_000, apart=True)},
    "a bias on every token": lambda: {"logit_bias": {str(n): 1 for n in range(199_000)}},
    "stops as long as they may be": lambda: {"stop": [str(n) * 4096 for n in range(10)], "n": 16},
    "100,000 unknown fields": lambda: {f"x{n}": n for n in range(100_000)},
    "a long key": lambda: {"k" * 5_000_000: 1},
    "raw markup": lambda: {
        "messages": [*USER, {"role": "assistant", "content": "<|channel|>analysis<|message|>x<|end|>" * 50_000}, *USER]
    },
    "almost raw markup": lambda: {
        "messages": [*USER, {"role": "assistant", "content": "<|channel|>final<|constrain|>" + "a" * 300_000}, *USER]
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BIG)
async def test_what_is_big_is_answered_or_refused_soon(site: Site, case: str) -> None:
    body = to_body(**BIG[case]())
    await site.canary.fresh()
    answer = await within(SOON_S, site.send(body))
    if answer.status == 200:
        assert message_of(answer).content == "Done."
    else:
        check_refused(answer, 413 if answer.status == 413 else 400)


# On the bare socket

HEAD = b"content-type: application/json\r\n"
BODY = to_body()
LENGTH = b"content-length: %d\r\n" % len(BODY)
RAW: dict[str, bytes] = {
    "two lengths": HEAD + LENGTH + b"content-length: 5\r\n\r\n" + BODY,
    "length and chunks": HEAD + LENGTH + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a length below zero": HEAD + b"content-length: -5\r\n\r\n",
    "a length in words": HEAD + b"content-length: five\r\n\r\n",
    "a length with a sign": HEAD + b"content-length: +5\r\n\r\n12345",
    "a bad chunk": HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
    "an unknown coding": HEAD + b"transfer-encoding: sponge\r\n\r\n",
    "a folded header": HEAD + b"x-a: 1\r\n 2\r\n" + LENGTH + b"\r\n" + BODY,
    "a header without a name": HEAD + b": x\r\n" + LENGTH + b"\r\n" + BODY,
    "a NUL in a header": HEAD + b"x-a: \0\r\n" + LENGTH + b"\r\n" + BODY,
    "a header of a megabyte": HEAD + b"x-a: " + b"y" * 2**20 + b"\r\n\r\n",
    "5,000 headers": HEAD + b"x-a: y\r\n" * 20_000 + b"\r\n",
    "no HTTP": b"\r\n\r\n\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10,
}


@pytest.mark.parametrize("case", RAW)
async def test_a_malformed_request_gets_one_answer_at_most_and_no_second_request_out_of_it(
    site: Site, case: str
) -> None:
    before = len(asked(site.ids))
    answer = await within_bytes(SOON_S, raw(site, RAW[case]))
    assert answer.count(b"HTTP/1.1 ") <= 2
    for line in answer.split(b"\r\n"):
        assert not line.startswith(b"HTTP/1.1 5")
    assert len(asked(site.ids)) - before <= 1


async def raw(site: Site, rest: bytes) -> bytes:
    """All that comes back for a POST with these headers and body, read until the server closes or is silent."""
    host, _, port = site.gateway.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    read = b""
    try:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n" + rest)
        async with asyncio.timeout(0.3):
            while piece := await reader.read(2**16):
                read += piece
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    return read


async def within_bytes(seconds: float, answer: Any) -> bytes:
    async with asyncio.timeout(seconds):
        return bytes(await answer)


# Answers

FENCE = "```"
SLOW_ANSWERS = {
    "blanks in a code fence": f"{FENCE}\n" + " " * 80_000 + "x",
    "blanks between two fences": f"{FENCE}\n" + " " * 80_000 + FENCE + " x",
    "blanks in front": " " * 80_000 + "x",
}


@pytest.mark.parametrize("text", SLOW_ANSWERS.values(), ids=SLOW_ANSWERS)
async def test_an_answer_that_is_no_json_stops_no_other_stream(site: Site, text: str) -> None:
    wire = WIRES["mlx_server"]
    before = site.text.script
    script = wire.script(f"<|channel|>final<|message|>{text}<|return|>")
    site.text.script = lambda asked: script  # type: ignore[assignment]
    try:
        form = {"response_format": {"type": "json_object"}}
        answer = await within(SOON_S, site.chat(model="gpt-oss-text", **form))
    finally:
        site.text.script = before
    assert answer.status == 200


SEPARATORS = "\u0085\u2028\u2029"
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 99},
}


@pytest.mark.parametrize(("path", "fields"), STREAMS.items(), ids=STREAMS)
async def test_no_line_of_a_stream_ends_at_a_character_of_an_answer(
    site: Site, path: str, fields: dict[str, Any]
) -> None:
    before = site.ids.script
    script = WIRES["vllm"].script(f"<|channel|>final<|message|>one{SEPARATORS}two<|return|>")
    site.ids.script = lambda asked: script  # type: ignore[assignment]
    try:
        answer = await site.send(json.dumps({"model": "gpt-oss-ids", "stream": True, **fields}).encode(), path)
    finally:
        site.ids.script = before
    assert answer.status == 200
    assert len(answer.raw.decode().splitlines()) == answer.raw.count(b"\n")
    assert set(SEPARATORS) <= set(json.dumps(answer.events, ensure_ascii=False))
