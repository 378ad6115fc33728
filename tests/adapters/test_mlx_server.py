"""Tests of the mlx_lm.server adapter: text prompts, hidden stop tokens and 404 errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tests.fakes import FakeMlxServer, Refusal
from tests.listening import listening
from unisono.core.generation import Chunk, CompletionJob, FinishReason, OutputForm, Prompt, Sampling
from unisono.core.ports import BackendOptions
from unisono.errors import BackendError, BackendOverloaded, BackendRejected
from unisono_adapters.mlx.mlx_server_backend import MlxServerBackend

JOB = CompletionJob(Prompt([200006], "<|start|>"), max_tokens=50)


@pytest.fixture
async def fake() -> AsyncIterator[FakeMlxServer]:
    async with FakeMlxServer(text="<|channel|>final<|message|>Hi") as fake:
        yield fake


@pytest.fixture
async def backend(fake: FakeMlxServer) -> AsyncIterator[MlxServerBackend]:
    backend = MlxServerBackend(BackendOptions("mlx_server", "mlx-community/gpt-oss-20b", fake.url))
    yield backend
    await backend.aclose()


async def collect(backend: MlxServerBackend, job: CompletionJob = JOB) -> list[Chunk]:
    return [chunk async for chunk in backend.complete(job)]


async def test_request_has_the_text_prompt_and_the_default_model(
    fake: FakeMlxServer, backend: MlxServerBackend
) -> None:
    await collect(backend)
    request = fake.requests[0].json
    assert (request["model"], request["prompt"]) == ("default_model", "<|start|>")
    assert "cache_salt" not in request


PENALTIES = {"off": (1.0, 0.0), "on": (1.2, 1.2)}


@pytest.mark.parametrize(("penalty", "sent"), PENALTIES.values(), ids=PENALTIES)
async def test_neutral_repetition_penalty_is_sent_as_zero(
    fake: FakeMlxServer, backend: MlxServerBackend, penalty: float, sent: float
) -> None:
    await collect(backend, replace(JOB, sampling=Sampling(repetition_penalty=penalty)))
    assert fake.requests[0].json["repetition_penalty"] == sent


async def test_stop_token_is_hidden(backend: MlxServerBackend) -> None:
    last = (await collect(backend))[-1]
    assert (last.finish, last.stop_token) == (FinishReason.STOP, None)
    capabilities = (await backend.probe()).capabilities
    assert (capabilities.prompt, capabilities.output, capabilities.stop_visible) == (
        OutputForm.TEXT,
        OutputForm.TEXT,
        False,
    )


async def test_404_is_a_backend_error_without_paths(fake: FakeMlxServer, backend: MlxServerBackend) -> None:
    fake.script = lambda request: Refusal(404, b'{"error": "No safetensors in /Users/someone/models"}', version=0)
    with pytest.raises(BackendError) as caught:
        await collect(backend)
    assert type(caught.value) is BackendError
    assert "/Users" not in caught.value.message
    assert "/Users" in str(caught.value.__cause__)
    assert "model" not in caught.value.message


async def test_400_is_a_rejection_with_the_message_of_the_server(
    fake: FakeMlxServer, backend: MlxServerBackend
) -> None:
    fake.script = lambda request: Refusal(400, b'{"error": "max_tokens must be at least 1"}', version=0)
    with pytest.raises(BackendRejected, match="max_tokens must be at least 1"):
        await collect(backend)


@pytest.mark.parametrize("value", [None, 7, ["a"]])
async def test_text_of_the_wrong_type_is_a_backend_error(value: object) -> None:
    async with FakeMlxServer(pieces=["a", value]) as fake:
        backend = MlxServerBackend(BackendOptions("mlx_server", "m", fake.url))
        with pytest.raises(BackendError):
            await collect(backend)
        await backend.aclose()


async def test_unhealthy_server_fails_the_probe(fake: FakeMlxServer, backend: MlxServerBackend) -> None:
    fake.healthy = False
    with pytest.raises(BackendOverloaded):
        await backend.probe()


async def test_cancelling_before_the_headers_keeps_the_socket_until_they_are_sent() -> None:
    """mlx_lm.server notices a disconnect only after it has sent its response headers.

    If the client is gone before, it generates up to the limit.
    """
    head = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    request_received, is_finished = asyncio.Event(), asyncio.Event()
    events: list[object] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int((await reader.readuntil(b"\r\n\r\n")).lower().partition(b"content-length: ")[2].split()[0])
        await reader.readexactly(size)
        request_received.set()
        try:
            events.append(await reader.read())
            writer.write(head)
            await writer.drain()
            events.append("head sent")
        except OSError as error:
            events.append(error)
        is_finished.set()

    async with listening(serve) as listener:
        backend = MlxServerBackend(BackendOptions("mlx_server", "m", listener.url))
        task = asyncio.create_task(collect(backend))
        async with asyncio.timeout(5):
            await request_received.wait()
            task.cancel()
            await is_finished.wait()
        await backend.aclose()
    assert events == [b"", "head sent"]
