"""Speech of models that pass through: bytes of any media type, sent as they arrive."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.gateway import Gateway
from tests.e2e.keyed import bearing, keyed
from tests.fakes import Refusal
from tests.fakes.faults import Fault
from tests.fakes.openai_modes import FakeModes
from tests.fakes.wire import Close, Reset, Stall, Step
from tests.passthrough.test_other_modes import model
from tests.passthrough.test_passing_chat import served
from tests.passthrough.test_passing_counted import used_by

BODY = {"input": "Say this.", "voice": "alloy", "response_format": "mp3", "odd": [None]}
AUDIO = b"RIFF" + b"\x00\xff" * 20_000 + b"end"


def ends_at(piece: int, end: Step) -> Fault:
    """Return a fault that ends the connection before a piece of the body."""
    return lambda steps: [*steps[:piece], end]


@asynccontextmanager
async def speaking(**settings: Any) -> AsyncIterator[tuple[Gateway, FakeModes]]:
    async with FakeModes(**settings) as fake, served(model(fake.url, "audio_speech")) as running:
        yield running, fake


def speech(running: Gateway, key: str = "", **fields: Any) -> Any:
    body = {"model": "other", **BODY, **fields}
    headers = bearing(key) if key else {}
    return running.session.post(running.url + "/v1/audio/speech", json=body, headers=headers)


async def test_bytes_and_media_type_are_those_of_the_server() -> None:
    async with speaking() as (running, fake), speech(running) as response:
        assert await response.read() == AUDIO
        assert response.headers["content-type"] == "audio/mpeg"
        assert response.headers["x-unisono-backend"] == "vllm-1"
    [request] = fake.requests
    assert (request.path, request.json) == ("/v1/audio/speech", {**BODY, "model": "bge"})


TYPES = {
    "audio/wav; rate=24000": "audio/wav; rate=24000",
    "text/event-stream": "text/event-stream",
    "application/xhtml+xml": "application/octet-stream",
    "image/svg+xml": "application/octet-stream",
}


@pytest.mark.parametrize(("sent", "received"), TYPES.items(), ids=TYPES)
async def test_a_browser_executes_no_answer(sent: str, received: str) -> None:
    async with speaking(media_type=sent) as (running, _), speech(running) as response:
        assert response.headers["content-type"] == received
        assert response.headers["x-content-type-options"] == "nosniff"
        assert await response.read() == AUDIO


REFUSED = {
    "invalid": (Refusal(400, b'{"error": {"message": "no such voice"}}'), 400, "no such voice"),
    "error": (Refusal(500, b"trace"), 502, ""),
}


@pytest.mark.parametrize(("refusal", "status", "detail"), REFUSED.values(), ids=REFUSED)
async def test_a_refusal_is_an_error_of_the_api(refusal: Refusal, status: int, detail: str) -> None:
    async with FakeModes(refusal) as fake:
        entries = [model(fake.url, "audio_speech")]
        async with served(*entries, router_settings={"num_retries": 0}) as running, speech(running) as response:
            body = await response.json()
    assert response.status == status
    assert detail in body["error"]["message"]


async def test_another_deployment_answers_after_a_failure_before_the_first_byte() -> None:
    async with FakeModes(faults=[ends_at(0, Close())]) as broken, FakeModes() as works:
        entries = model(broken.url, "audio_speech", order=0), model(works.url, "audio_speech", order=1)
        async with served(*entries) as running, speech(running) as response:
            assert await response.read() == AUDIO
    assert len(broken.requests) == len(works.requests) == 1


NO_AUDIO: dict[str, dict[str, Any]] = {
    "nothing": {"audio": ()},
    "a page": {"media_type": "text/html; charset=utf-8", "audio": (b"<html>",)},
}


@pytest.mark.parametrize("settings", NO_AUDIO.values(), ids=NO_AUDIO)
async def test_an_answer_without_audio_is_a_failure(settings: dict[str, Any]) -> None:
    async with FakeModes(**settings) as broken, FakeModes() as works:
        entries = [model(broken.url, "audio_speech", order=0), model(works.url, "audio_speech", order=1)]
        async with served(*entries) as running, speech(running) as response:
            assert await response.read() == AUDIO
        async with served(entries[0]) as running, speech(running) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (502, "backend_protocol_error")


async def test_a_guardrail_of_answers_does_not_delay_audio() -> None:
    words = [{"keyword": "zebra", "action": "BLOCK"}]
    params = {"guardrail": "litellm_content_filter", "mode": "post_call", "default_on": True, "blocked_words": words}
    guardrails = [{"guardrail_name": "words", "litellm_params": params}]
    async with (
        FakeModes(faults=[ends_at(1, Stall())]) as fake,
        served(model(fake.url, "audio_speech"), guardrails=guardrails) as running,
        speech(running) as spoken,
    ):
        assert await spoken.content.readany() == AUDIO[:4]


async def test_a_client_that_leaves_stalled_audio_frees_the_backend() -> None:
    async with speaking(faults=[ends_at(1, Stall())]) as (running, fake):
        async with speech(running) as spoken:
            assert await spoken.content.readany() == AUDIO[:4]
        await fake.gone()


@pytest.mark.parametrize("fault", [ends_at(2, Close()), ends_at(2, Reset())], ids=["closed", "reset"])
async def test_an_answer_that_breaks_off_does_not_look_complete(fault: Fault, caplog: pytest.LogCaptureFixture) -> None:
    async with speaking(faults=[fault]) as (running, _), speech(running) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_client_disconnect_ends_the_backend_request() -> None:
    async with speaking(delay_s=60.0) as (running, fake):

        async def listen() -> None:
            async with speech(running) as response:
                await response.read()

        task = asyncio.ensure_future(listen())
        await fake.asked()
        task.cancel()
        await fake.gone()


DONE = b'data: {"type": "speech.audio.done", "usage": {"input_tokens": 7, "output_tokens": 9, "total_tokens": 16}}\n\n'
# Audio with such bytes in it reports nothing.
USAGES: dict[str, tuple[dict[str, Any], set[int], int]] = {
    "estimated": ({}, {*range(100, 121)}, 25),
    "reported": ({"media_type": "text/event-stream", "audio": (b"data: {}\n\n", DONE)}, {7}, 9),
    "bytes": ({"audio": (b"\x00" * 1_600, DONE)}, {*range(100, 121)}, 1),
}


@pytest.mark.parametrize(("settings", "read", "made"), USAGES.values(), ids=USAGES)
async def test_usage_is_reported_by_events_or_estimated(
    settings: dict[str, Any], read: set[int], made: int, tmp_path: Path
) -> None:
    async with (
        FakeModes(**settings) as fake,
        keyed({"model_list": [model(fake.url, "audio_speech")]}, tmp_path) as (running, keys),
    ):
        record, key = await keys.issue()
        async with speech(running, key, input="x" * 300) as response:
            await response.read()
        async with asyncio.timeout(5):
            while not (used := await used_by(running, record.tenant, record.id)).requests:
                await asyncio.sleep(0.02)
    assert used.input in read
    assert used.output == made


async def test_a_missing_input_is_named() -> None:
    async with speaking() as (running, fake):
        answer = await running.post("/v1/audio/speech", json.dumps({"model": "other"}).encode())
    assert (answer.status, answer.body["error"]["param"]) == (400, "input")
    assert not fake.requests
