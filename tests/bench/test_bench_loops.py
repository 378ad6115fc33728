"""Tool loops of the bench: calling model, tool server, step times, response reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
import pytest

from bench import calling_backend, http_client, tool_loop_load, tool_server, vllm_wire
from bench.calling_backend import ANSWER_TOKENS, STEPS, TIMES_PATH
from bench.prose import Corpus, build
from tests.mcp.arguments import sent
from unisono.core.generation import CALL
from unisono.core.tool_host import ToolServer, ToolTransport
from unisono.harmony.encoding import load_encoding
from unisono.mcp import McpHost

ENCODING = load_encoding()


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return build(ENCODING)


async def start_server(make: Callable[[], asyncio.Protocol]) -> tuple[asyncio.Server, int]:
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    return server, int(server.sockets[0].getsockname()[1])


async def post(port: int, path: str, body: object) -> bytes:
    parts = list[bytes]()
    connection = await http_client.connect(port)
    try:
        assert await connection.request(http_client.message(path, orjson.dumps(body)), parts.append) == 200
    finally:
        connection.close()
    return b"".join(parts)


@pytest.fixture
async def model(corpus: Corpus) -> AsyncIterator[int]:
    shared = calling_backend.CallingBackend(corpus, ENCODING)
    server, port = await start_server(lambda: calling_backend.CallingConnection(shared))
    yield port
    server.close()


def prompt_of(question: str) -> list[int]:
    return ENCODING.encode_marked(f"<|start|>user<|message|>{question}<|end|><|start|>assistant")


def tokens_in(stream: bytes) -> list[int]:
    events = [event.partition(b"data: ")[2] for event in stream.split(b"\n\n")]
    chunks = [orjson.loads(event) for event in events if event.startswith(b"{")]
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]


async def test_the_model_makes_all_its_calls_and_then_answers(model: int, corpus: Corpus) -> None:
    prompt, calls = prompt_of(" one" * 40), list[str]()
    for _ in range(STEPS):
        body = {"model": vllm_wire.MODEL, "prompt": prompt, "max_tokens": 500, "stream": True}
        tokens = tokens_in(await post(model, "/v1/completions", body))
        assert tokens[-1] == CALL
        calls.append(ENCODING.decode(tokens))
        prompt += tokens
    assert all(f'"text":"1-{step}"' in call for step, call in enumerate(calls))
    body = {"model": vllm_wire.MODEL, "prompt": prompt, "max_tokens": 500, "stream": True}
    assert tokens_in(await post(model, "/v1/completions", body)) == list(corpus.answer(ANSWER_TOKENS).tokens)
    times = orjson.loads(await post(model, TIMES_PATH.decode(), {}))
    assert [received_at <= sent_at for received_at, sent_at in times["1"]] == [True] * (STEPS + 1)
    assert orjson.loads(await post(model, TIMES_PATH.decode(), {})) == {}


async def test_each_question_has_its_own_tool_loop(model: int) -> None:
    for question in (" one two", " three four", " one two"):
        body = {"model": vllm_wire.MODEL, "prompt": prompt_of(question), "max_tokens": 500, "stream": True}
        await post(model, "/v1/completions", body)
    times = orjson.loads(await post(model, TIMES_PATH.decode(), {}))
    assert {number: len(step_times) for number, step_times in times.items()} == {"1": 2, "2": 1}


async def test_the_mcp_client_of_the_gateway_calls_the_tool(corpus: Corpus) -> None:
    model_times: dict[str, tuple[float, float]] = {}
    shared = calling_backend.CallingBackend(corpus, ENCODING)
    server, port = await start_server(lambda: tool_server.ToolConnection(shared, model_times))
    host = McpHost()
    url = f"http://127.0.0.1:{port}/mcp"
    tool_server_config = ToolServer("bench", url, transport=ToolTransport.STREAMABLE_HTTP, configured=True)
    try:
        assert [tool.name for tool in (await host.list_tools(tool_server_config)).tools] == [calling_backend.TOOL_NAME]
        assert (await host.call(tool_server_config, calling_backend.TOOL_NAME, sent({"text": "1-0"}))).text == "1-0"
        received_at, sent_at = orjson.loads(await post(port, TIMES_PATH.decode(), {}))["1-0"]
        assert received_at <= sent_at
        assert model_times == {}
    finally:
        await host.aclose()
        server.close()


def test_step_time_excludes_the_tool_time() -> None:
    result = tool_loop_load.ToolLoopResult()
    tool_loop_load.compute_steps(
        result, {"1": [[0.0, 1.0], [1.010, 2.0], [2.020, 3.0]]}, {"1-0": [1.001, 1.006], "1-1": [2.0, 2.015]}
    )
    assert (result.steps, result.faults) == (2, 0)
    assert result.step_p99_ms == pytest.approx(5.0)
    assert 5.0 <= result.tool_p50_ms <= 15.001


def test_a_step_without_a_tool_call_is_a_fault() -> None:
    result = tool_loop_load.ToolLoopResult()
    tool_loop_load.compute_steps(result, {"1": [[0.0, 1.0], [1.1, 2.0]]}, {})
    assert (result.steps, result.faults) == (0, 1)


def response(*outputs: str | None, text: str = "ok") -> dict[str, Any]:
    calls = [
        {
            "type": "mcp_call",
            "arguments": orjson.dumps({"text": output}).decode(),
            "output": output,
            "error": None if output else "x",
        }
        for output in outputs
    ]
    return {"status": "completed", "output": [*calls, {"type": "message", "content": [{"text": text}]}]}


WHOLE = ("a", "b", "c", "d", "e")
RESPONSES: dict[str, tuple[dict[str, Any], str | None]] = {
    "complete": (response(*WHOLE), None),
    "failed call": (response(*WHOLE[:4], None), "a tool call failed: x"),
    "missing call": (response(*WHOLE[:4]), "4 of 5 tool calls"),
    "different answer": (response(*WHOLE, text="no"), "the answer differs"),
}


@pytest.mark.parametrize(("body", "expected"), RESPONSES.values(), ids=RESPONSES)
def test_the_reader_reports_missing_or_wrong_output(body: dict[str, Any], expected: str | None) -> None:
    reader = tool_loop_load.LoopReader()
    event = b"event: response.completed\ndata: " + orjson.dumps({"response": body}) + b"\n\n"
    reader.feed(event[:40])
    reader.feed(event[40:])
    fault = reader.fault(200, "ok")
    assert fault == expected if expected is None or fault is None else fault.startswith(expected)
