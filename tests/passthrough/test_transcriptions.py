"""Transcriptions of models that pass through: forms with files, their limits, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from email.parser import BytesParser
from email.policy import HTTP
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.gateway import Answer, Gateway, to_answer
from tests.e2e.keyed import bearing, keyed
from tests.fakes import Refusal
from tests.fakes.openai_modes import FakeModes
from tests.fakes.wire import Seen
from tests.passthrough.test_other_modes import model
from tests.passthrough.test_passing_chat import served
from tests.passthrough.test_passing_counted import used_by

AUDIO = bytes(range(256)) * 4_096  # a megabyte with every byte, also line ends and dashes
MODE = "audio_transcription"
Part = tuple[str, str | None, bytes]


def form(*parts: Part, boundary: str = "limit") -> bytes:
    """Return a form; a part is its name, its file name or None, and its content."""
    body = b""
    for name, file, content in parts:
        about = f'form-data; name="{name}"' + (f'; filename="{file}"\r\nContent-Type: audio/wav' if file else "")
        body += f"--{boundary}\r\nContent-Disposition: {about}\r\n\r\n".encode() + content + b"\r\n"
    return body + f"--{boundary}--\r\n".encode()


USUAL: tuple[Part, ...] = (("model", None, b"other"), ("language", None, b"de"), ("file", "a.wav", AUDIO))


def parts_of(seen: Seen) -> list[Part]:
    head = f"Content-Type: {seen.headers['content-type']}\r\n\r\n".encode()
    message = BytesParser(policy=HTTP).parsebytes(head + seen.body)
    found: list[Part] = []
    for part in message.iter_parts():
        content = part.get_payload(decode=True)
        assert isinstance(content, bytes)
        name = part.get_param("name", header="content-disposition")
        found.append((str(name), part.get_filename(), content))
    return found


@asynccontextmanager
async def listening(
    script: Any = None,
    *,
    unisono: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    **fake_settings: Any,
) -> AsyncIterator[tuple[Gateway, FakeModes]]:
    async with FakeModes(script, **fake_settings) as fake:
        sections = {"unisono": unisono or {}, "router_settings": {"num_retries": 0}, **(settings or {})}
        async with served(model(fake.url, MODE), **sections) as running:
            yield running, fake


async def send(
    running: Gateway,
    parts: Sequence[Part] = USUAL,
    *,
    body: Any = None,
    path: str = "/v1/audio/transcriptions",
    **h: str,
) -> Answer:
    headers = {"content-type": "multipart/form-data; boundary=limit", **h}
    content = form(*parts) if body is None else body
    content = BytesIO(content) if isinstance(content, bytes) else content
    async with running.session.post(running.url + path, data=content, headers=headers) as response:
        return to_answer(response.status, response.headers, await response.read())


ORDERS = {"model first": USUAL, "file first": USUAL[::-1]}


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/audio/translations"])
@pytest.mark.parametrize("parts", ORDERS.values(), ids=ORDERS)
async def test_a_form_is_forwarded_unchanged_except_for_the_model(parts: Sequence[Part], path: str) -> None:
    async with listening() as (running, fake):
        answer = await send(running, parts, path=path)
    assert answer.status == 200, answer.raw
    assert answer.body == {"text": "Said.", "usage": {"prompt_tokens": 3, "total_tokens": 3}}
    [request] = fake.requests
    assert request.path == "/v1/" + path.removeprefix("/v1/").removeprefix("/")
    assert sorted(parts_of(request)) == sorted(
        [("model", None, b"bge"), *(part for part in parts if part[0] != "model")]
    )
    assert b"audio/wav" in request.body


async def test_the_model_of_the_path_wins() -> None:
    async with listening() as (running, fake):
        assert (await send(running, USUAL[1:], path="/openai/deployments/other/audio/transcriptions")).status == 200
    assert ("model", None, b"bge") in parts_of(fake.requests[0])


async def test_a_failed_deployment_is_replaced_by_another_with_the_same_form() -> None:
    async with (
        FakeModes(Refusal(500, b"{}")) as broken,
        FakeModes() as works,
        served(model(broken.url, MODE, order=0), model(works.url, MODE, order=1)) as running,
    ):
        answer = await send(running)
    assert answer.status == 200
    [first], [second] = broken.requests, works.requests
    assert first.body == second.body


async def test_translations_are_streamed_as_transcriptions_are() -> None:
    """vLLM streams transcriptions and translations."""
    events = b'data: {"object": "translation.chunk"}\n\n'
    for path in ("/v1/audio/transcriptions", "/v1/audio/translations"):
        async with listening(Refusal(200, events, content_type="text/event-stream")) as (running, fake):
            answer = await send(running, [*USUAL, ("stream", None, b"true")], path=path)
        assert (answer.status, answer.raw) == (200, events)
        assert ("stream", None, b"true") in parts_of(fake.requests[0])


async def test_text_and_events_keep_their_media_type() -> None:
    for kind in ("text/plain; charset=utf-8", "text/vtt", "text/event-stream"):
        refusal = Refusal(200, b"data: x\n\n", content_type=kind)
        async with listening(refusal) as (running, _):
            headers = {"content-type": "multipart/form-data; boundary=limit"}
            url = running.url + "/v1/audio/transcriptions"
            async with running.session.post(url, data=BytesIO(form(*USUAL)), headers=headers) as response:
                assert (response.headers["content-type"], await response.read()) == (kind, b"data: x\n\n")


BAD: dict[str, tuple[bytes, int, str | None]] = {
    "no file": (form(*USUAL[:2]), 400, "file"),
    "no model": (form(("model", None, b"unknown"), *USUAL[1:]), 404, "model"),
    "two models": (form(USUAL[0], *USUAL), 400, "model"),
    "a file as model": (form(*USUAL, ("model", "m.txt", b"other")), 400, "model"),
    "a long field": (form(*USUAL, ("prompt", None, b"x" * 70_000)), 400, "prompt"),
    "cut off": (form(*USUAL)[:-30], 400, None),
    "another boundary": (form(*USUAL, boundary="other"), 400, None),
    "no form": (b"{}", 400, None),
    "empty": (b"", 400, None),
    "many parts": (form(*USUAL, *[("x", None, b"")] * 200), 400, None),
    "a part without a name": (form(*USUAL).replace(b'name="language"', b"x"), 400, None),
}


@pytest.mark.parametrize(("body", "status", "param"), BAD.values(), ids=BAD)
async def test_an_invalid_form_is_refused(body: bytes, status: int, param: str | None) -> None:
    async with listening() as (running, fake):
        answer = await send(running, body=body)
    assert (answer.status, answer.body["error"]["param"]) == (status, param)
    assert not fake.requests


async def test_other_media_types_are_refused() -> None:
    async with listening() as (running, fake):
        json = await send(running, body=b"{}", **{"content-type": "application/json"})
        chat = await send(running, path="/v1/chat/completions")
        missing = await send(running, path="/v1/files")
    assert (json.status, chat.status) == (415, 415)
    assert (missing.status, missing.body["error"]["message"]) == (404, "There is no endpoint for POST /v1/files.")
    assert not fake.requests


async def endless(seconds: float, pieces: int) -> AsyncIterator[bytes]:
    yield form(USUAL[0])[:-11]
    yield b'--limit\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    for _ in range(pieces):
        await asyncio.sleep(seconds)
        yield b"x" * 65_536


async def test_a_large_upload_is_refused_when_the_limit_is_reached() -> None:
    async with listening(unisono={"max_upload_bytes": 100_000}) as (running, fake):
        known = await send(running)
        # aiohttp may notice the closed connection before it reads the answer.
        try:
            unknown = (await send(running, body=endless(0, 10_000))).status
        except aiohttp.ClientError:
            unknown = 413
        assert (await send(running, [*USUAL[:2], ("file", "a", b"small")])).status == 200
    assert (known.status, unknown) == (413, 413)
    assert len(fake.requests) == 1


async def test_a_slow_upload_is_ended() -> None:
    async with listening(unisono={"upload_timeout_s": 0.2}) as (running, fake):
        try:
            status = (await send(running, body=endless(0.5, 20))).status
        except aiohttp.ClientError:
            status = 408
    assert status == 408
    assert not fake.requests


async def test_a_server_that_refuses_without_reading_is_understood() -> None:
    refusal = Refusal(413, b'{"error": {"message": "too large"}}')
    async with FakeModes(refusal) as fake:
        fake.reads_body = False
        async with served(model(fake.url, MODE), router_settings={"num_retries": 0}) as running:
            answer = await send(running, [*USUAL[:2], ("file", "a.wav", AUDIO * 20)])
    assert (answer.status, answer.body["error"]["code"]) == (400, "backend_rejected_request")
    assert "too large" in answer.body["error"]["message"]


async def test_a_client_disconnect_ends_the_backend_request() -> None:
    async with listening(delay_s=60.0) as (running, fake):
        task = asyncio.ensure_future(send(running))
        await fake.asked()
        task.cancel()
        await fake.gone()


USAGES: dict[str, tuple[Any, int, int]] = {
    "tokens": ({"type": "tokens", "input_tokens": 9, "output_tokens": 4, "total_tokens": 13}, 9, 4),
    "seconds": ({"type": "duration", "seconds": 2.05}, 21, 17),
    "none": (None, 656, 4),
}


@pytest.mark.parametrize(("usage", "sent", "made"), USAGES.values(), ids=USAGES)
async def test_usage_is_charged_to_the_key(usage: Any, sent: int, made: int, tmp_path: Path) -> None:
    async with (
        FakeModes(usage=usage) as fake,
        keyed({"model_list": [model(fake.url, MODE)]}, tmp_path) as (running, keys),
    ):
        record, key = await keys.issue()
        assert (await send(running, **bearing(key))).status == 200
        assert (await send(running)).status == 401
        async with asyncio.timeout(5):
            while not (used := await used_by(running, record.tenant, record.id)).requests:
                await asyncio.sleep(0.02)
    assert abs(used.input - sent) <= 12
    assert abs(used.output - made) <= 5
    assert key.encode() not in fake.requests[0].body
    assert "authorization" not in fake.requests[0].headers
