"""Hostile requests: each gets a proper response soon, and no other stream stalls.

Client, gateway and backends share one event loop, so a gap in the canary stream shows a blocked loop. The longest gap
measured was 0.2 s (ten megabytes of objects). The limits are exceeded only by a blocked loop.
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
# On an idle machine no request takes longer than 1.5 s.
REQUEST_TIMEOUT_S = 20.0

pytestmark = pytest.mark.asyncio(loop_scope="module")

DONE = "<|channel|>final<|message|>Done.<|return|>"
USER = [{"role": "user", "content": "Hi"}]


@dataclass
class Site:
    """A gateway with a fake for `gpt-oss-ids`, one for `gpt-oss-text`, and a canary stream."""

    ids: Fake
    text: Fake
    gateway: Gateway
    canary: Canary

    async def send(self, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> Answer:
        """Send a POST request; read the response even if the server answers before the body is sent."""
        all_headers = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        url = self.gateway.url + path
        async with self.gateway.session.post(url, data=chunks_of(body), headers=all_headers) as response:
            return to_answer(response.status, response.headers, await response.read())

    async def chat(self, **fields: Any) -> Answer:
        return await self.send(to_body(**fields))


async def chunks_of(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 2**16):
        yield body[start : start + 2**16]


def to_body(**fields: Any) -> bytes:
    return json.dumps({"model": "gpt-oss-ids", "messages": USER, **fields}, ensure_ascii=False).encode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    ids, text = WIRES["vllm"], WIRES["mlx_server"]
    async with ids.fake() as ids_fake, text.fake() as text_fake, ids.fake() as canary_fake:
        done, done_text = ids.script(DONE), text.script(DONE)
        canary_script = ids.script("<|channel|>final<|message|>" + " ".join(map(str, range(10_000))), delay_s=STEP_S)
        ids_fake.script = lambda request: done  # type: ignore[assignment]
        text_fake.script = lambda request: done_text  # type: ignore[assignment]
        canary_fake.script = lambda request: canary_script  # type: ignore[assignment]
        deployments = [
            deployment("gpt-oss-ids", ids, ids_fake),
            deployment("gpt-oss-text", text, text_fake),
            deployment("gpt-oss-slow", ids, canary_fake),
        ]
        async with gateway({"model_list": deployments}) as running, singing(running, "gpt-oss-slow") as canary:
            yield Site(ids_fake, text_fake, running, canary)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def gateway_stays_healthy(site: Site) -> AsyncIterator[None]:
    """After each test, check that the canary stream did not stall and the next request succeeds."""
    await site.canary.fresh()
    yield
    assert await site.canary.worst_s() < LONGEST_GAP_S
    assert message_of(await site.chat()).content == "Done."


def check_error(response: Answer, status: int, code: str | None = None, param: str | None = None) -> None:
    assert response.status == status, response.raw[:500]
    error = response.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert len(error["message"]) < 1000
    if code is not None:
        assert error["code"] == code
    if param is not None:
        assert error["param"] == param


async def within(seconds: float, pending: Any) -> Answer:
    async with asyncio.timeout(seconds):
        response: Answer = await pending
        return response


# Invalid bodies

CHAT = to_body().removesuffix(b"}")
DEEP = 100_000
BODIES: dict[str, tuple[bytes, int, str]] = {
    "empty body": (b"", 400, "invalid_value"),
    "truncated object": (b'{"model": "gpt-oss-ids", "messages": [', 400, "invalid_value"),
    "array": (b"[]", 400, "invalid_value"),
    "string": (b'"hello"', 400, "invalid_value"),
    "null": (b"null", 400, "invalid_value"),
    "two objects": (to_body() + to_body(), 400, "invalid_value"),
    "NaN": (CHAT + b', "temperature": NaN}', 400, "invalid_value"),
    "infinity": (CHAT + b', "temperature": Infinity}', 400, "invalid_value"),
    "number beyond a double": (CHAT + b', "temperature": 1e400}', 400, "invalid_value"),
    "number of a million digits": (CHAT + b', "seed": ' + b"9" * 10**6 + b"}", 400, "invalid_value"),
    "raw NUL": (b'{"model": "gpt\0oss"}', 400, "invalid_value"),
    "lone surrogate": (CHAT + b', "user": "\\ud800"}', 400, "invalid_value"),
    "invalid UTF-8": (b'{"model": "\xff\xfe"}', 400, "invalid_value"),
    "UTF-16": (to_body().decode().encode("utf-16"), 400, "invalid_value"),
    "byte order mark": (b"\xef\xbb\xbf" + to_body(), 400, "invalid_value"),
    "gzip without content-encoding": (gzip.compress(to_body()), 400, "invalid_value"),
    "deeply nested arrays": (CHAT + b', "x": ' + b"[" * DEEP + b"]" * DEEP + b"}", 400, "invalid_value"),
    "deeply nested objects": (CHAT + b', "x": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}", 400, "invalid_value"),
    "ten megabytes of objects": (b"[" + b"{}," * 3_300_000 + b"{}]", 400, "invalid_value"),
    "twenty megabytes": (to_body(user="x" * 20 * 2**20), 413, "body_too_large"),
    "duplicate keys, the last one invalid": (CHAT + b', "model": 7}', 400, "invalid_value"),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("case", BODIES)
async def test_an_invalid_body_is_rejected(site: Site, case: str) -> None:
    body, status, code = BODIES[case]
    try:
        check_error(await within(REQUEST_TIMEOUT_S, site.send(body)), status, code)
    except aiohttp.ClientOSError:
        # The server closed the connection while the client was still sending.
        assert status == 413


async def test_an_excessive_content_length_is_rejected_before_the_body(site: Site) -> None:
    response = await post_raw(site, b"content-type: application/json\r\ncontent-length: 20971520\r\n\r\n{")
    assert response.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"body_too_large"' in response


HEADERS: dict[str, tuple[dict[str, str], int]] = {
    "deflate": ({"content-encoding": "deflate"}, 415),
    "br": ({"content-encoding": "br"}, 415),
    "two encodings": ({"content-encoding": "gzip, identity"}, 415),
    "text": ({"content-type": "text/plain"}, 415),
    "a form": ({"content-type": "application/x-www-form-urlencoded"}, 415),
    "multipart": ({"content-type": "multipart/form-data; boundary=x"}, 415),
    "similar to JSON": ({"content-type": "application/jsonp"}, 415),
    "another host": ({"host": "evil.example"}, 403),
    "host with an allowed prefix": ({"host": "localhost.evil.example"}, 403),
    "host with a path": ({"host": "localhost/health/liveness?"}, 403),
    "another origin": ({"origin": "https://evil.example"}, 403),
    "null origin": ({"origin": "null"}, 403),
}


@pytest.mark.parametrize("case", HEADERS)
async def test_unsupported_headers_are_rejected(site: Site, case: str) -> None:
    headers, status = HEADERS[case]
    body = gzip.compress(to_body()) if "content-encoding" in headers else to_body()
    check_error(await within(REQUEST_TIMEOUT_S, site.send(body, **headers)), status)


async def test_a_gzip_bomb_is_refused(site: Site) -> None:
    bomb = gzip.compress(b" " * 50_000_000)
    await site.canary.fresh()
    check_error(await within(REQUEST_TIMEOUT_S, site.send(bomb, content_encoding="gzip")), 413)


# Values of the wrong type: the error names the field

WRONG_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "model as a number": ({"model": 7}, "model"),
    "null model": ({"model": None}, "model"),
    "a model name of 10 kB": ({"model": "x" * 10_000}, "model"),
    "messages as an object": ({"messages": {}}, "messages"),
    "empty messages": ({"messages": []}, "messages"),
    "null message": ({"messages": [None]}, "messages.0"),
    "message as a list": ({"messages": [[]]}, "messages.0"),
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
    "temperature as a boolean": ({"temperature": True}, "temperature"),
    "temperature too high": ({"temperature": 99}, "temperature"),
    "top_p negative": ({"top_p": -0.1}, "top_p"),
    "n 0": ({"n": 0}, "n"),
    "n 17": ({"n": 17}, "n"),
    "n 10^30": ({"n": 10**30}, "n"),
    "max_tokens below zero": ({"max_tokens": -1}, "max_tokens"),
    "fractional max_tokens": ({"max_tokens": 1.5}, "max_tokens"),
    "stop as a number": ({"stop": 7}, "stop"),
    "an empty stop": ({"stop": [""]}, "stop.0"),
    "a thousand stop strings": ({"stop": ["x"] * 1000}, "stop"),
    "a seed beyond 64 bits": ({"seed": 2**64}, "seed"),
    "logit bias on a word": ({"logit_bias": {"word": 1}}, "logit_bias.word"),
    "logit bias on a structural token": ({"logit_bias": {"200002": 1}}, "logit_bias.200002"),
    "stream as text": ({"stream": "yes"}, "stream"),
    "tools as an object": ({"tools": {}}, "tools"),
    "a tool that is a number": ({"tools": [1]}, "tools.0"),
    "a tool without a function": ({"tools": [{"type": "function"}]}, "tools.0.function"),
    "an unknown effort": ({"reasoning_effort": "ultra"}, "reasoning_effort"),
    "tool result of another call": (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}]},
                {"role": "tool", "tool_call_id": "call_1", "content": "x"},
            ]
        },
        "messages.1.tool_call_id",
    ),
    "tool result without an id": ({"messages": [*USER, {"role": "tool", "content": "x"}]}, "messages.1.tool_call_id"),
    "tool call without a name": (
        {"messages": [*USER, {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {}}]}]},
        "messages.1.tool_calls.0.function.name",
    ),
}


@pytest.mark.parametrize("case", WRONG_VALUES)
async def test_a_wrong_value_is_rejected_with_its_field(site: Site, case: str) -> None:
    fields, param = WRONG_VALUES[case]
    check_error(await within(REQUEST_TIMEOUT_S, site.chat(**fields)), 400, param=param)


async def test_an_unknown_model_is_not_found(site: Site) -> None:
    for name in ("gpt-9", "../../etc/passwd", "gpt-oss-ids\n", "<|start|>", "gpt-oss-ids\0"):
        check_error(await within(REQUEST_TIMEOUT_S, site.chat(model=name)), 404, "model_not_found")


NAMES = {
    "line break": "look\n# Instructions",
    "trailing line break": "look\n",
    "marker": "<|start|>",
    "space": "my tool",
    "empty": "",
    "too long": "x" * 129,
    "letters of another script": "погода",
    "right-to-left override": "look\u202e",
    "NUL": "look\0",
    "path": "../../etc/passwd",
    "quote": 'look"',
    "brackets": "look(); }",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
async def test_a_hostile_tool_name_is_rejected_in_every_field(site: Site, name: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}
    requests: dict[str, dict[str, Any]] = {
        "tools.0.function.name": {"tools": [{"type": "function", "function": {"name": name}}]},
        "functions.0.name": {"functions": [{"name": name}]},
        "messages.1.tool_calls.0.function.name": {"messages": [*USER, {"role": "assistant", "tool_calls": [call]}]},
    }
    for param, fields in requests.items():
        check_error(await within(REQUEST_TIMEOUT_S, site.chat(**fields)), 400, param=param)


# Expensive but valid text

HEAVY: dict[str, tuple[str, int]] = {
    "spaces": (" " * 100_000, 200),
    "spaces beyond the tokenizer's limit": (" " * 2_000_000, 400),
    "line breaks": ("\n" * 100_000, 200),
    "tabs and spaces": ("\t " * 100_000, 200),
    "a megabyte of Han characters": ("中文字符" * 87_000, 400),
    "a hundred thousand Han characters": ("中文字符" * 25_000, 200),
    "combining accents": ("e" + "\u0301" * 64_000, 200),
    "letters": ("a" * 400_000, 200),
    "capitals": ("A" * 400_000, 200),
    "digits": ("7" * 300_000, 200),
    "slashes": ("/" * 200_000, 200),
    "emoji": ("👩‍👩‍👧" * 10_000, 200),
    "NULs": ("\0" * 20_000, 200),
    "incomplete markers": ("<|" * 100_000, 400),
    "markers": ("<|start|>" * 10_000, 200),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt-oss-ids", "gpt-oss-text"])
@pytest.mark.parametrize("case", HEAVY)
async def test_expensive_text_gets_a_response_soon(site: Site, case: str, model: str) -> None:
    text, status = HEAVY[case]
    body = to_body(model=model, messages=[{"role": "user", "content": text}])
    await site.canary.fresh()
    response = await within(REQUEST_TIMEOUT_S, site.send(body))
    if response.status == 400:
        check_error(response, 400)
    else:
        assert message_of(response).content == "Done."
    assert response.status == status


def tool(number: int, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"tool_{number}", "description": "x", "parameters": parameters}}


def string_properties(count: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"p{n}": {"type": "string", "description": "A text"} for n in range(count)},
    }


def exponential_references() -> dict[str, Any]:
    """A schema whose definitions each refer to the next one ten times."""
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


def history_with_calls(count: int, *, legacy: bool = False) -> list[Any]:
    """A message with many calls, answered in reverse order.

    `legacy`: one old-style function call per message instead.
    """
    if legacy:
        messages: list[Any] = [
            {"role": "assistant", "function_call": {"name": f"{'ab'[n * 2 // count]}", "arguments": ""}}
            for n in range(count)
        ]
        return [*USER, *messages, *({"role": "function", "name": "b", "content": "x"} for _ in range(count // 2))]
    tool_calls = [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": ""}} for n in range(count)]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": "x"} for n in reversed(range(count))]
    return [*USER, {"role": "assistant", "tool_calls": tool_calls}, *results]


LARGE_REQUESTS: dict[str, Callable[[], dict[str, Any]]] = {
    "an enum of 100,000": lambda: {
        "tools": [tool(0, {"type": "object", "properties": {"x": {"enum": [str(n) for n in range(100_000)]}}})]
    },
    "an enum of long words": lambda: {
        "tools": [
            tool(0, {"type": "object", "properties": {"x": {"enum": ["中" * 10_000 + str(n) for n in range(8)]}}})
        ]
    },
    "500 tools with 50 parameters": lambda: {"tools": [tool(n, string_properties(50)) for n in range(500)]},
    "200 tools with 10 parameters": lambda: {"tools": [tool(n, string_properties(10)) for n in range(200)]},
    "10,000 tools": lambda: {"tools": [tool(n, {}) for n in range(10_000)]},
    "a tool with 20,000 parameters": lambda: {"tools": [tool(0, string_properties(20_000))]},
    "a billion laughs": lambda: {"tools": [tool(0, exponential_references())]},
    "a schema that refers to itself": lambda: {
        "tools": [tool(0, {"type": "object", "properties": {"x": {"$ref": "#"}, "y": {"$ref": "#/properties/y"}}})]
    },
    "a schema 60 deep": lambda: {"tools": [tool(0, nested(28))]},
    "a schema 200 deep": lambda: {"tools": [tool(0, nested(200))]},
    "a pattern with exponential backtracking": lambda: {
        "tools": [tool(0, {"type": "object", "properties": {"x": {"type": "string", "pattern": "(a+)+$" * 1000}}})]
    },
    "50,000 messages": lambda: {"messages": [{"role": "user", "content": "x"}] * 50_000},
    "10,000 parts": lambda: {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 10_000}]},
    "9,000 calls": lambda: {"messages": history_with_calls(9_000)},
    "20,000 calls": lambda: {"messages": history_with_calls(20_000)},
    "13,000 legacy function calls": lambda: {"messages": history_with_calls(13_000, legacy=True)},
    "logit bias on every token": lambda: {"logit_bias": {str(n): 1 for n in range(199_000)}},
    "70,000 invalid parts": lambda: {"messages": [{"role": "user", "content": [{"type": "x"}] * 70_000}]},
    "stop strings of the maximum length": lambda: {"stop": [str(n) * 4096 for n in range(10)], "n": 16},
    "100,000 unknown fields": lambda: {f"x{n}": n for n in range(100_000)},
    "a long key": lambda: {"k" * 5_000_000: 1},
    "raw Harmony markup": lambda: {
        "messages": [*USER, {"role": "assistant", "content": "<|channel|>analysis<|message|>x<|end|>" * 50_000}, *USER]
    },
    "incomplete Harmony markup": lambda: {
        "messages": [*USER, {"role": "assistant", "content": "<|channel|>final<|constrain|>" + "a" * 300_000}, *USER]
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE_REQUESTS)
async def test_a_large_request_gets_a_response_soon(site: Site, case: str) -> None:
    body = to_body(**LARGE_REQUESTS[case]())
    await site.canary.fresh()
    response = await within(REQUEST_TIMEOUT_S, site.send(body))
    if response.status == 200:
        assert message_of(response).content == "Done."
    else:
        check_error(response, 413 if response.status == 413 else 400)


# Malformed HTTP on a bare socket

HEAD = b"content-type: application/json\r\n"
BODY = to_body()
LENGTH = b"content-length: %d\r\n" % len(BODY)
MALFORMED: dict[str, bytes] = {
    "two content lengths": HEAD + LENGTH + b"content-length: 5\r\n\r\n" + BODY,
    "content length and chunked encoding": HEAD + LENGTH + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "negative content length": HEAD + b"content-length: -5\r\n\r\n",
    "content length in words": HEAD + b"content-length: five\r\n\r\n",
    "content length with a sign": HEAD + b"content-length: +5\r\n\r\n12345",
    "invalid chunk": HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
    "unknown transfer encoding": HEAD + b"transfer-encoding: sponge\r\n\r\n",
    "folded header": HEAD + b"x-a: 1\r\n 2\r\n" + LENGTH + b"\r\n" + BODY,
    "header without a name": HEAD + b": x\r\n" + LENGTH + b"\r\n" + BODY,
    "NUL in a header": HEAD + b"x-a: \0\r\n" + LENGTH + b"\r\n" + BODY,
    "header of a megabyte": HEAD + b"x-a: " + b"y" * 2**20 + b"\r\n\r\n",
    "5,000 headers": HEAD + b"x-a: y\r\n" * 20_000 + b"\r\n",
    "not HTTP": b"\r\n\r\n\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10,
}


@pytest.mark.parametrize("case", MALFORMED)
async def test_a_malformed_request_is_not_read_as_two_requests(site: Site, case: str) -> None:
    before = len(asked(site.ids))
    response = await within_bytes(REQUEST_TIMEOUT_S, post_raw(site, MALFORMED[case]))
    assert response.count(b"HTTP/1.1 ") <= 2
    for line in response.split(b"\r\n"):
        assert not line.startswith(b"HTTP/1.1 5")
    assert len(asked(site.ids)) - before <= 1


async def post_raw(site: Site, rest: bytes) -> bytes:
    """Send a POST with these headers and this body; read until the server closes or is silent."""
    host, _, port = site.gateway.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    received = b""
    try:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n" + rest)
        async with asyncio.timeout(0.3):
            while chunk := await reader.read(2**16):
                received += chunk
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    return received


async def within_bytes(seconds: float, pending: Any) -> bytes:
    async with asyncio.timeout(seconds):
        return bytes(await pending)


# Answers that are costly to parse

FENCE = "```"
COSTLY_ANSWERS = {
    "blanks in a code fence": f"{FENCE}\n" + " " * 80_000 + "x",
    "blanks between two fences": f"{FENCE}\n" + " " * 80_000 + FENCE + " x",
    "leading blanks": " " * 80_000 + "x",
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("text", COSTLY_ANSWERS.values(), ids=COSTLY_ANSWERS)
async def test_an_answer_that_is_not_json_does_not_block_other_streams(site: Site, text: str) -> None:
    wire = WIRES["mlx_server"]
    previous_script = site.text.script
    script = wire.script(f"<|channel|>final<|message|>{text}<|return|>")
    site.text.script = lambda request: script  # type: ignore[assignment]
    try:
        fields = {"response_format": {"type": "json_object"}}
        response = await within(REQUEST_TIMEOUT_S, site.chat(model="gpt-oss-text", **fields))
    finally:
        site.text.script = previous_script
    assert response.status == 200


SEPARATORS = "\u0085\u2028\u2029"
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 99},
}


@pytest.mark.parametrize(("path", "fields"), STREAMS.items(), ids=STREAMS)
async def test_line_separators_in_text_do_not_split_stream_lines(site: Site, path: str, fields: dict[str, Any]) -> None:
    previous_script = site.ids.script
    script = WIRES["vllm"].script(f"<|channel|>final<|message|>one{SEPARATORS}two<|return|>")
    site.ids.script = lambda request: script  # type: ignore[assignment]
    try:
        response = await site.send(json.dumps({"model": "gpt-oss-ids", "stream": True, **fields}).encode(), path)
    finally:
        site.ids.script = previous_script
    assert response.status == 200
    assert len(response.raw.decode().splitlines()) == response.raw.count(b"\n")
    assert set(SEPARATORS) <= set(json.dumps(response.events, ensure_ascii=False))
