"""Chat Completions from a real client's socket to a real backend's: who leaves, what breaks, and what is heavy."""

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
THINKING = "<|channel|>analysis<|message|>" + "hm, " * 500


def tokens(text: str) -> list[int]:
    return ENCODING.encode_marked(text)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "gpt-oss", "messages": [{"role": "user", "content": "2+2?"}], **fields}


PHASES: dict[str, dict[str, Any]] = {
    "before the backend answers": {"tokens": tokens(ANSWER), "first_delay_s": 60.0},
    "while it thinks": {"tokens": tokens(THINKING), "delay_s": 0.01},
    "while a call is held": {"tokens": tokens(CALL.replace("ls", "ls " * 500)), "delay_s": 0.01},
}


@pytest.mark.parametrize("fields", PHASES.values(), ids=PHASES)
@pytest.mark.parametrize(("stream", "choices"), [(True, 1), (False, 1), (True, 2)], ids=["stream", "whole", "two"])
async def test_a_client_that_leaves_frees_the_backend(fields: dict[str, Any], stream: bool, choices: int) -> None:
    async with FakeVllm(**fields) as fake, gateway(config_of(f"vllm@{fake.url}")) as running:
        body = json.dumps(chat(stream=stream, n=choices)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        port = int(running.url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        await fake.asked(choices)
        await asyncio.sleep(0.1)
        left_at = asyncio.get_running_loop().time()
        writer.close()
        for index in range(choices):
            assert await fake.gone(index) - left_at < 1.0


async def test_a_dead_backend_is_an_http_error_in_a_stream_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    async with gateway(config_of(f"vllm@http://127.0.0.1:{port}")) as running:
        for stream in (True, False):
            answer = await running.post("/v1/chat/completions", json.dumps(chat(stream=stream)).encode())
            assert answer.status == 503
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["retry-after"] == "1"
            assert answer.body["error"]["type"] == "server_error"
            assert str(port) not in answer.body["error"]["message"]


async def test_a_backend_that_dies_amid_a_stream_never_looks_like_success() -> None:
    async with (
        FakeVllm(tokens=tokens(ANSWER), faults=(reset_at(6),)) as fake,
        gateway(config_of(f"vllm@{fake.url}", router_settings={"num_retries": 0})) as running,
    ):
        answer = await running.post("/v1/chat/completions", json.dumps(chat(stream=True)).encode())
        assert answer.status == 200
        assert not answer.done
        assert "error" in answer.events[-1]
        assert all(choice["finish_reason"] is None for event in answer.events[:-1] for choice in event["choices"])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_custom_tool_goes_there_and_back(stream: bool) -> None:
    async with FakeVllm(tokens=tokens(CALL)) as fake, gateway(config_of(f"vllm@{fake.url}")) as running:
        tools = [{"type": "custom", "custom": {"name": "shell", "description": "Runs a command"}}]
        answer = await running.post("/v1/chat/completions", json.dumps(chat(stream=stream, tools=tools)).encode())
        rendered = ENCODING.decode(fake.requests[0].json["prompt"])
        assert "Runs a command" in rendered
        assert "input: string" in rendered
        if stream:
            calls = [
                call
                for event in answer.events
                for one in event["choices"]
                for call in one["delta"].get("tool_calls", ())
            ]
            assert calls[0]["type"] == "custom"
            assert calls[0]["custom"] == {"name": "shell", "input": ""}
            assert calls[1]["custom"] == {"input": "ls -l"}
            assert answer.events[-1]["choices"][0]["finish_reason"] == "tool_calls"
        else:
            [call] = answer.body["choices"][0]["message"]["tool_calls"]
            assert call["custom"] == {"name": "shell", "input": "ls -l"}


async def canary(running: Gateway, gaps: list[float]) -> None:
    """Read a slow stream and note the seconds between what arrives."""
    now = asyncio.get_running_loop().time
    async with running.session.post(f"{running.url}/v1/chat/completions", json=chat(stream=True, seed=1)) as response:
        last = now()
        async for _ in response.content.iter_any():
            gaps.append(now() - last)
            last = now()


HEAVY = {
    "a hundred thousand spaces": (" " * 100_000, 200),
    "a hundred thousand newlines": ("\n" * 100_000, 200),
    "unbroken Han text": ("中文字符" * 25_000, 200),
    "unbroken letters": ("a" * 400_000, 200),
    "more than the tokenizer takes": (" " * 2_000_000, 400),
    "more than the window": ("中" * 450_000, 400),
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "status"), HEAVY.values(), ids=HEAVY)
async def test_heavy_text_is_answered_in_a_second_and_harms_no_other_stream(text: str, status: int) -> None:
    def script(asked: dict[str, Any]) -> VllmScript:
        if asked.get("seed") == 1:
            return VllmScript(tokens=tokens(THINKING), delay_s=0.02)
        return VllmScript(tokens=tokens(ANSWER))

    async with FakeVllm(script=script) as fake, gateway(config_of(f"vllm@{fake.url}")) as running:
        gaps: list[float] = []
        other = asyncio.create_task(canary(running, gaps))
        while len(gaps) < 5:
            await asyncio.sleep(0.01)
        body = json.dumps(chat(messages=[{"role": "user", "content": text}]), ensure_ascii=False).encode()
        headers = {"content-type": "application/json"}
        begun = asyncio.get_running_loop().time()
        async with running.session.post(
            f"{running.url}/v1/chat/completions", data=io.BytesIO(body), headers=headers
        ) as answer:
            error = (await answer.json()).get("error")
        assert asyncio.get_running_loop().time() - begun < 1.0
        assert answer.status == status
        assert (error is None) == (status == 200)
        seen = len(gaps)
        while len(gaps) < seen + 3:
            await asyncio.sleep(0.01)
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        # Client, fake backend and gateway share this loop, so the bound is on all of them together.
        assert max(gaps[5:]) < 0.3


async def test_a_body_that_drips_is_cut_off() -> None:
    config = config_of("vllm@http://127.0.0.1:9", unisono={"body_timeout_s": 0.2})
    async with gateway(config) as running:
        port = int(running.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: 1000\r\n\r\n{")
        async with asyncio.timeout(2):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_a_body_without_end_is_cut_off() -> None:
    async with gateway(config_of("vllm@http://127.0.0.1:9", unisono={"max_body_bytes": 10_000})) as running:

        async def endless() -> Any:
            for _ in range(1000):
                yield b"x" * 1000

        try:
            async with running.session.post(
                f"{running.url}/v1/chat/completions", data=endless(), headers={"content-type": "application/json"}
            ) as response:
                assert response.status == 413
        except aiohttp.ClientOSError:
            pass  # the client was still writing when the connection was closed
