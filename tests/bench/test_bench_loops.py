"""The tool loops of the bench: a model that calls, a server that answers, a reader that notices what is missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import pytest

from bench import http_client, loops, tool_model, tool_server, vllm_wire
from bench.material import Material, build
from bench.tool_model import ANSWER_TOKENS, STEPS, TIMES
from tests.mcp.arguments import sent
from unisono.core.generation import CALL
from unisono.core.tools import ToolServer, ToolTransport
from unisono.harmony.encoding import load_encoding
from unisono.mcp import McpHost

ENCODING = load_encoding()


@pytest.fixture(scope="module")
def stuff() -> Material:
    return build(ENCODING)


async def opened(make: Callable[[], asyncio.Protocol]) -> tuple[asyncio.Server, int]:
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    return server, int(server.sockets[0].getsockname()[1])


async def said(port: int, path: str, body: object) -> bytes:
    parts = list[bytes]()
    connection = await http_client.connect(port)
    try:
        assert await connection.request(http_client.message(path, orjson.dumps(body)), parts.append) == 200
    finally:
        connection.close()
    return b"".join(parts)


@pytest.fixture
async def model(stuff: Material) -> AsyncIterator[int]:
    shared = tool_model.Model(stuff, ENCODING)
    server, port = await opened(lambda: tool_model.Asked(shared))
    yield port
    server.close()


def prompt_of(question: str) -> list[int]:
    return ENCODING.encode_marked(f"<|start|>user<|message|>{question}<|end|><|start|>assistant")


def tokens_in(stream: bytes) -> list[int]:
    events = [event.partition(b"data: ")[2] for event in stream.split(b"\n\n")]
    chunks = [orjson.loads(event) for event in events if event.startswith(b"{")]
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]


async def test_the_model_calls_so_many_times_and_then_answers(model: int, stuff: Material) -> None:
    prompt, calls = prompt_of(" one" * 40), list[str]()
    for _ in range(STEPS):
        body = {"model": vllm_wire.MODEL, "prompt": prompt, "max_tokens": 500, "stream": True}
        tokens = tokens_in(await said(model, "/v1/completions", body))
        assert tokens[-1] == CALL
        calls.append(ENCODING.decode(tokens))
        prompt += tokens
    assert all(f'"text":"1-{step}"' in call for step, call in enumerate(calls))
    body = {"model": vllm_wire.MODEL, "prompt": prompt, "max_tokens": 500, "stream": True}
    assert tokens_in(await said(model, "/v1/completions", body)) == list(stuff.answer(ANSWER_TOKENS).tokens)
    times = orjson.loads(await said(model, TIMES.decode(), {}))
    assert [came <= sent for came, sent in times["1"]] == [True] * (STEPS + 1)
    assert orjson.loads(await said(model, TIMES.decode(), {})) == {}


async def test_every_question_is_a_loop_of_its_own(model: int) -> None:
    for question in (" one two", " three four", " one two"):
        body = {"model": vllm_wire.MODEL, "prompt": prompt_of(question), "max_tokens": 500, "stream": True}
        await said(model, "/v1/completions", body)
    times = orjson.loads(await said(model, TIMES.decode(), {}))
    assert {number: len(noted) for number, noted in times.items()} == {"1": 2, "2": 1}


async def test_the_gateways_own_host_uses_the_tool(stuff: Material) -> None:
    noted: dict[str, tuple[float, float]] = {}
    shared = tool_model.Model(stuff, ENCODING)
    server, port = await opened(lambda: tool_server.Answering(shared, noted))
    host = McpHost()
    url = f"http://127.0.0.1:{port}/mcp"
    there = ToolServer("bench", url, transport=ToolTransport.STREAMABLE_HTTP, configured=True)
    try:
        assert [tool.name for tool in (await host.list_tools(there)).tools] == [tool_model.TOOL]
        assert (await host.call(there, tool_model.TOOL, sent({"text": "1-0"}))).text == "1-0"
        asked, answered = orjson.loads(await said(port, TIMES.decode(), {}))["1-0"]
        assert asked <= answered
        assert noted == {}
    finally:
        await host.aclose()
        server.close()


def test_a_step_is_what_lies_between_without_the_tool() -> None:
    told = loops.Told()
    loops.weigh(told, {"1": [[0.0, 1.0], [1.010, 2.0], [2.020, 3.0]]}, {"1-0": [1.001, 1.006], "1-1": [2.0, 2.015]})
    assert (told.steps, told.faults) == (2, 0)
    assert told.step_p99_ms == pytest.approx(5.0)
    assert 5.0 <= told.tool_p50_ms <= 15.001


def test_a_step_without_its_tool_is_a_fault() -> None:
    told = loops.Told()
    loops.weigh(told, {"1": [[0.0, 1.0], [1.1, 2.0]]}, {})
    assert (told.steps, told.faults) == (0, 1)


def response(*outputs: str | None, text: str = "ok") -> dict[str, Any]:
    made = [
        {
            "type": "mcp_call",
            "arguments": orjson.dumps({"text": output}).decode(),
            "output": output,
            "error": None if output else "x",
        }
        for output in outputs
    ]
    return {"status": "completed", "output": [*made, {"type": "message", "content": [{"text": text}]}]}


WHOLE = ("a", "b", "c", "d", "e")
ANSWERS: dict[str, tuple[dict[str, Any], str | None]] = {
    "all of it": (response(*WHOLE), None),
    "a call that failed": (response(*WHOLE[:4], None), "a call failed: x"),
    "a call too few": (response(*WHOLE[:4]), "4 calls of 5"),
    "another answer": (response(*WHOLE, text="no"), "the answer differs"),
}


@pytest.mark.parametrize(("body", "wrong"), ANSWERS.values(), ids=ANSWERS)
def test_the_reader_notices_what_is_missing(body: dict[str, Any], wrong: str | None) -> None:
    reader = loops.LoopReader()
    event = b"event: response.completed\ndata: " + orjson.dumps({"response": body}) + b"\n\n"
    reader.feed(event[:40])
    reader.feed(event[40:])
    found = reader.wrong(200, "ok")
    assert found == wrong if wrong is None or found is None else found.startswith(wrong)
