"""Chat Completions over real sockets: disconnects, backend failures and heavy prompts."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from typing import Any

import aiohttp
import pytest

from tests.e2e.gateway import Gateway, config_of, gateway
from tests.fakes import FakeVllm, VllmScript, reset_at
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
ANSWER = (
    "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Four, of course.<|return|>"
)
CALL = '<|channel|>commentary to=functions.shell <|constrain|>json<|message|>{"input":"ls -l"}<|call|>'
LONG_REASONING = "<|channel|>analysis<|message|>" + "hm, " * 500


def tokens(text: str) -> list[int]:
    return ENCODING.encode_marked(text)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "gpt-oss", "messages": [{"role": "user", "content": "2+2?"}], **fields}


PHASES: dict[str, dict[str, Any]] = {
    "before the backend answers": {"tokens": tokens(ANSWER), "first_delay_s": 60.0},
    "during reasoning": {"tokens": tokens(LONG_REASONING), "delay_s": 0.01},
    "during a buffered tool call": {"tokens": tokens(CALL.replace("ls", "ls " * 500)), "delay_s": 0.01},
}


@pytest.mark.parametrize("fields", PHASES.values(), ids=PHASES)
@pytest.mark.parametrize(
    ("stream", "choices"), [(True, 1), (False, 1), (True, 2)], ids=["stream", "no stream", "two choices"]
)
async def test_a_client_disconnect_aborts_the_backend_request(
    fields: dict[str, Any], stream: bool, choices: int
) -> None:
    async with FakeVllm(**fields) as fake, gateway(config_of(f"vllm@{fake.url}")) as server:
        body = json.dumps(chat(stream=stream, n=choices)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        port = int(server.url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        await fake.asked(choices)
        await asyncio.sleep(0.1)
        disconnected_at = asyncio.get_running_loop().time()
        writer.close()
        for index in range(choices):
            assert await fake.gone(index) - disconnected_at < 1.0


async def test_an_unreachable_backend_is_an_http_error_with_and_without_streaming() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    async with gateway(config_of(f"vllm@http://127.0.0.1:{port}")) as server:
        for stream in (True, False):
            response = await server.post("/v1/chat/completions", json.dumps(chat(stream=stream)).encode())
            assert response.status == 503
            assert response.headers["content-type"] == "application/json"
            assert response.headers["retry-after"] == "1"
            assert response.body["error"]["type"] == "server_error"
            assert str(port) not in response.body["error"]["message"]


async def test_a_backend_failure_during_a_stream_ends_it_with_an_error_event() -> None:
    async with (
        FakeVllm(tokens=tokens(ANSWER), faults=(reset_at(6),)) as fake,
        gateway(config_of(f"vllm@{fake.url}", router_settings={"num_retries": 0})) as server,
    ):
        response = await server.post("/v1/chat/completions", json.dumps(chat(stream=True)).encode())
        assert response.status == 200
        assert not response.done
        assert "error" in response.events[-1]
        assert all(choice["finish_reason"] is None for event in response.events[:-1] for choice in event["choices"])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "no stream"])
async def test_custom_tools_are_converted_in_both_directions(stream: bool) -> None:
    async with FakeVllm(tokens=tokens(CALL)) as fake, gateway(config_of(f"vllm@{fake.url}")) as server:
        tools = [{"type": "custom", "custom": {"name": "shell", "description": "Runs a command"}}]
        response = await server.post("/v1/chat/completions", json.dumps(chat(stream=stream, tools=tools)).encode())
        rendered = ENCODING.decode(fake.requests[0].json["prompt"])
        assert "Runs a command" in rendered
        assert "type shell = (_: string) => any;" in rendered
        if stream:
            calls = [
                call
                for event in response.events
                for choice in event["choices"]
                for call in choice["delta"].get("tool_calls", ())
            ]
            assert calls[0]["type"] == "custom"
            assert calls[0]["custom"] == {"name": "shell", "input": ""}
            assert calls[1]["custom"] == {"input": "ls -l"}
            assert response.events[-1]["choices"][0]["finish_reason"] == "tool_calls"
        else:
            [call] = response.body["choices"][0]["message"]["tool_calls"]
            assert call["custom"] == {"name": "shell", "input": "ls -l"}


async def record_gaps(server: Gateway, gaps: list[float]) -> None:
    """Read a slow stream and record the seconds between arrivals."""
    now = asyncio.get_running_loop().time
    async with server.session.post(f"{server.url}/v1/chat/completions", json=chat(stream=True, seed=1)) as response:
        last = now()
        async for _ in response.content.iter_any():
            gaps.append(now() - last)
            last = now()


HEAVY = {
    "a hundred thousand spaces": (" " * 100_000, 200),
    "a hundred thousand newlines": ("\n" * 100_000, 200),
    "unbroken Han text": ("中文字符" * 25_000, 200),
    "unbroken letters": ("a" * 400_000, 200),
    "more than the tokenizer accepts": (" " * 2_000_000, 400),
    "more than the context window": ("中" * 450_000, 400),
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "status"), HEAVY.values(), ids=HEAVY)
async def test_heavy_prompts_are_answered_in_a_second_without_stalling_other_streams(text: str, status: int) -> None:
    def script(request: dict[str, Any]) -> VllmScript:
        if request.get("seed") == 1:
            return VllmScript(tokens=tokens(LONG_REASONING), delay_s=0.02)
        return VllmScript(tokens=tokens(ANSWER))

    async with FakeVllm(script=script) as fake, gateway(config_of(f"vllm@{fake.url}")) as server:
        gaps: list[float] = []
        other_stream = asyncio.create_task(record_gaps(server, gaps))
        while len(gaps) < 5:
            await asyncio.sleep(0.01)
        body = json.dumps(chat(messages=[{"role": "user", "content": text}]), ensure_ascii=False).encode()
        headers = {"content-type": "application/json"}
        started = asyncio.get_running_loop().time()
        async with server.session.post(
            f"{server.url}/v1/chat/completions", data=io.BytesIO(body), headers=headers
        ) as response:
            error = (await response.json()).get("error")
        assert asyncio.get_running_loop().time() - started < 1.0
        assert response.status == status
        assert (error is None) == (status == 200)
        gaps_before = len(gaps)
        while len(gaps) < gaps_before + 3:
            await asyncio.sleep(0.01)
        other_stream.cancel()
        await asyncio.gather(other_stream, return_exceptions=True)
        # Client, fake backend and gateway share one event loop, so the limit applies to all of them together.
        assert max(gaps[5:]) < 0.3


async def test_a_slow_body_times_out() -> None:
    config = config_of("vllm@http://127.0.0.1:9", unisono={"body_timeout_s": 0.2})
    async with gateway(config) as server:
        port = int(server.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: 1000\r\n\r\n{")
        async with asyncio.timeout(2):
            response = await reader.read()
        assert response.startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_an_endless_body_is_refused() -> None:
    async with gateway(config_of("vllm@http://127.0.0.1:9", unisono={"max_body_bytes": 10_000})) as server:

        async def endless() -> Any:
            for _ in range(1000):
                yield b"x" * 1000

        try:
            async with server.session.post(
                f"{server.url}/v1/chat/completions", data=endless(), headers={"content-type": "application/json"}
            ) as response:
                assert response.status == 413
        except aiohttp.ClientOSError:
            pass  # the client was still writing when the connection was closed
