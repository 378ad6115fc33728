"""Streams with keep-alives before the first event: each has exactly one terminal event."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.api.responses.folding import fold
from tests.api.responses.mounted import Mounted, mounted
from tests.e2e.gateway import config_of
from tests.fakes import FakeVllm, VllmScript, close_at
from unisono.harmony.encoding import load_encoding

ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>ok<|return|>")
KEEP_ALIVE = ": keep-alive"


@pytest.fixture
async def fake() -> AsyncIterator[FakeVllm]:
    async with FakeVllm(tokens=ANSWER) as fake:
        yield fake


@pytest.fixture
async def gateway(fake: FakeVllm) -> AsyncIterator[Mounted]:
    config = config_of(f"vllm@{fake.url}", router_settings={"num_retries": 0})
    async with mounted(config, keep_alive_s=0.05) as running:
        yield running


async def frames(gateway: Mounted, path: str = "/v1/responses", **fields: Any) -> list[str]:
    body = {"model": "gpt-oss", "input": "Hi", "stream": True, **fields}
    reply = await gateway.ask("POST", path, body)
    assert reply.status == 200, reply.body
    *received, rest = reply.body.decode().split("\n\n")
    assert rest == ""
    return received


def response_of(received: list[str]) -> dict[str, Any]:
    """Return the response at the end of a stream, ignoring keep-alives."""
    event_frames = [frame for frame in received if frame != KEEP_ALIVE]
    assert event_frames.pop() == "data: [DONE]"
    return fold([json.loads(frame.split("\ndata: ")[1]) for frame in event_frames]).response


async def test_a_silent_stream_gets_keep_alives_between_events(gateway: Mounted, fake: FakeVllm) -> None:
    fake.script = lambda request: VllmScript(tokens=ANSWER, first_delay_s=0.2, delay_s=0.12)
    received = await frames(gateway)
    assert received[0] == KEEP_ALIVE
    assert KEEP_ALIVE in received[received.index(next(f for f in received if f.startswith("event:"))) :]
    assert response_of(received)["status"] == "completed"


@pytest.mark.parametrize("path", ["/v1/responses", "/open-responses/v1/responses"])
@pytest.mark.parametrize("store", [True, False], ids=["stored", "not stored"])
async def test_a_backend_failure_after_a_keep_alive_is_a_failed_response(
    gateway: Mounted, fake: FakeVllm, store: bool, path: str
) -> None:
    fake.script = lambda request: VllmScript(tokens=ANSWER, first_delay_s=0.2, faults=(close_at(0),))
    received = await frames(gateway, path, store=store)
    assert received[0] == KEEP_ALIVE
    response = response_of(received)
    assert (response["status"], response["output"]) == ("failed", [])
    stored = await gateway.ask("GET", f"{path}/{response['id']}")
    assert stored.status == (200 if store else 404)
    if store:
        assert stored.json() == response


async def test_an_invalid_input_after_a_keep_alive_is_a_failed_response(fake: FakeVllm) -> None:
    # Converting this many items takes a moment, and only the last one is invalid.
    items = [{"role": "user", "content": f"{n} " + "word " * 20} for n in range(15_000)]
    call = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}
    wrong = {"type": "function_call_output", "call_id": "call_x", "output": "o"}
    async with mounted(config_of(f"vllm@{fake.url}"), keep_alive_s=0.002) as gateway:
        received = await frames(gateway, input=[*items, call, wrong])
        assert received[0] == KEEP_ALIVE
        response = response_of(received)
        assert (response["status"], response["error"]["code"]) == ("failed", "invalid_prompt")
        assert "call_x" in response["error"]["message"]
        assert fake.requests == []
        assert (await gateway.ask("GET", f"/v1/responses/{response['id']}")).status == 404
