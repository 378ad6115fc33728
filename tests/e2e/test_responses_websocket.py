"""Responses over a WebSocket, from a client through the gateway to a backend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from tests.api.responses.folding import TERMINAL, fold
from tests.e2e.gateway import Gateway, config_of, gateway
from tests.e2e.wires import PHASES, WIRES, Fake, Script, Wire, deployment
from tests.fakes import FakeVllm, VllmScript
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
# The target is 250 ms and an idle machine needs a few; the rest is for a busy machine.
ABORT_LIMIT_S = 1.0
ANSWER = "<|channel|>final<|message|>Sunny.<|return|>"
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
KEY = "sk-right"


class Client:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def send(self, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": "response.create", "model": "gpt-oss", "input": "Hi", **fields}))

    async def event(self) -> Any:
        frame = await asyncio.wait_for(self.socket.recv(), 10.0)
        assert isinstance(frame, str)
        return json.loads(frame)

    async def answer(self) -> Any:
        """Return the finished response after checking every event."""
        events = [await self.event()]
        while events[-1]["type"] not in TERMINAL:
            assert "status" not in events[-1], events[-1]
            events.append(await self.event())
        return fold(events).response

    async def close(self) -> None:
        await self.socket.close()

    async def crash(self) -> None:
        self.socket.transport.abort()


@asynccontextmanager
async def connected(running: Gateway, path: str = "/v1/responses", **headers: str) -> AsyncIterator[Client]:
    async with connect(running.url.replace("http", "ws", 1) + path, additional_headers=headers) as socket:
        yield Client(socket)


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("path", ["/v1/responses", "/responses", "/open-responses/v1/responses"])
async def test_a_continued_prompt_extends_the_last_one_token_for_token(path: str, store: bool) -> None:
    # Not the canonical form: ids that no tokenizer would choose for this text.
    split = [ENCODING.encode_text(letter)[0] for letter in '{"at":"Paris"}']
    head = ENCODING.encode_marked("<|channel|>commentary to=functions.look <|constrain|>json<|message|>")
    call_tokens = [*head, *split, *ENCODING.encode_marked("<|call|>")]
    outputs = [call_tokens, ENCODING.encode_marked(ANSWER)]
    async with (
        FakeVllm(script=lambda request: VllmScript(tokens=outputs.pop(0))) as fake,
        gateway(config_of(f"vllm@{fake.url}")) as running,
        connected(running, path) as client,
    ):
        await client.send(input="Weather in Paris?", tools=TOOLS, store=store)
        first = await client.answer()
        [call] = first["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "18 degrees"}
        await client.send(input=[output], tools=TOOLS, store=store, previous_response_id=first["id"])
        second = await client.answer()
        assert second["output"][0]["content"][0]["text"] == "Sunny."
        prompts = [request.json["prompt"] for request in fake.requests if request.path == "/v1/completions"]
        assert prompts[1][: len(prompts[0]) + len(call_tokens)] == prompts[0] + call_tokens


@pytest.mark.slow
async def test_frames_are_processed_in_order_whatever_their_size() -> None:
    async with (
        FakeVllm(script=lambda request: VllmScript(tokens=ENCODING.encode_marked(ANSWER))) as fake,
        gateway(config_of(f"vllm@{fake.url}")) as running,
        connected(running) as client,
    ):
        await client.send(instructions="1", metadata={"n": "1"}, unknown=[{"a": 1}] * 100_000)
        await client.send(instructions="2", metadata={"n": "2"})
        await client.send(instructions="3", metadata={"n": "3"}, unknown=[{"a": 1}] * 100_000)
        assert [(await client.answer())["metadata"]["n"] for _ in range(3)] == ["1", "2", "3"]


@pytest.mark.slow
@pytest.mark.parametrize("disconnect", [Client.close, Client.crash])
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
@pytest.mark.parametrize("phase", PHASES.values(), ids=PHASES)
async def test_a_disconnect_frees_all_backends_at_once(
    phase: Callable[[Wire], Script], wire: Wire, disconnect: Callable[[Client], Awaitable[None]]
) -> None:
    async with wire.fake() as fake, gateway({"model_list": [deployment("gpt-oss", wire, fake)]}) as running:
        script_backend(fake, phase(wire))
        async with connected(running) as client:
            for lane in ("a", "b"):
                await client.send(stream_id=lane, tools=TOOLS)
            await fake.asked(2)
            await asyncio.sleep(0.08)
            left_at = asyncio.get_running_loop().time()
            await disconnect(client)
            for index in range(2):
                assert await fake.gone(index) - left_at < ABORT_LIMIT_S


def script_backend(fake: Fake, script: Script) -> None:
    fake.script = lambda request: script  # type: ignore[assignment]
    fake.requests.clear()


async def test_a_connection_survives_invalid_requests() -> None:
    async with (
        FakeVllm(tokens=ENCODING.encode_marked(ANSWER)) as fake,
        gateway(config_of(f"vllm@{fake.url}")) as running,
        connected(running) as client,
    ):
        for frame in ("nonsense", "[]", '{"type":"response.append"}', "[" * 500):
            await client.socket.send(frame)
            assert (await client.event())["status"] == 400
        await client.socket.send(b'{"type":"response.create"}')
        assert (await client.event())["status"] == 400
        await client.send(model="nobody")
        assert (await client.event())["error"]["code"] == "model_not_found"
        await client.send(generate=False, input=[])
        warmed_up = await client.answer()
        await client.send(previous_response_id=warmed_up["id"])
        assert (await client.answer())["status"] == "completed"


async def test_a_frame_over_the_body_limit_closes_the_connection() -> None:
    async with (
        FakeVllm(tokens=ENCODING.encode_marked(ANSWER)) as fake,
        gateway(config_of(f"vllm@{fake.url}", unisono={"max_body_bytes": 10_000})) as running,
        connected(running) as client,
    ):
        await client.send(input="x" * 9_000)
        assert (await client.answer())["status"] == "completed"
        await client.send(input="x" * 11_000)
        with pytest.raises(ConnectionClosedError) as closed:
            await client.event()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


async def test_an_unreachable_backend_does_not_close_the_connection() -> None:
    async with FakeVllm(tokens=ENCODING.encode_marked(ANSWER)) as fake:
        url = fake.url
    async with gateway(config_of(f"vllm@{url}")) as running, connected(running) as client:
        for _ in range(2):
            await client.send()
            error = await client.event()
            assert (error["status"], error["error"]["type"]) == (503, "server_error")


async def test_a_failed_continuation_evicts_its_previous_response() -> None:
    unknown_call = {"type": "function_call_output", "call_id": "call_unknown", "output": "18 degrees"}
    async with (
        FakeVllm(tokens=ENCODING.encode_marked(ANSWER)) as fake,
        gateway(config_of(f"vllm@{fake.url}")) as running,
    ):
        for path in ("/v1/responses", "/open-responses/v1/responses"):
            async with connected(running, path) as client:
                await client.send(store=False)
                first = await client.answer()
                codes = []
                for input_ in ([unknown_call], "Go on."):
                    await client.send(input=input_, store=False, previous_response_id=first["id"])
                    codes.append((await client.event())["error"]["code"])
                assert codes[0] != codes[1] == "previous_response_not_found"
                await client.send(input="Go on.", store=False)
                assert (await client.answer())["status"] == "completed"


async def test_a_connection_without_a_valid_key_is_rejected() -> None:
    async with (
        FakeVllm(tokens=ENCODING.encode_marked(ANSWER)) as fake,
        gateway(config_of(f"vllm@{fake.url}", general_settings={"master_key": KEY})) as running,
    ):
        for headers in ({}, {"authorization": "Bearer sk-wrong"}):
            with pytest.raises(InvalidStatus) as rejected:
                async with connected(running, **headers):
                    pass
            assert rejected.value.response.status_code == 401
        async with connected(running, authorization=f"Bearer {KEY}") as client:
            await client.send()
            assert (await client.answer())["status"] == "completed"
