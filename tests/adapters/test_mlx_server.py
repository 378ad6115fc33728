"""mlx_lm.server's own ways: text, a hidden stop, HTTP/1.0, and 404 for its own failures."""

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
from unisono_adapters.mlx.server import MlxServerBackend

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


async def test_it_sends_the_text_to_the_model_that_is_loaded(fake: FakeMlxServer, backend: MlxServerBackend) -> None:
    await collect(backend)
    asked = fake.requests[0].json
    assert (asked["model"], asked["prompt"]) == ("default_model", "<|start|>")
    assert "cache_salt" not in asked


PENALTIES = {"off": (1.0, 0.0), "on": (1.2, 1.2)}


@pytest.mark.parametrize(("asked", "sent"), PENALTIES.values(), ids=PENALTIES)
async def test_a_neutral_repetition_penalty_is_spelled_as_off(
    fake: FakeMlxServer, backend: MlxServerBackend, asked: float, sent: float
) -> None:
    await collect(backend, replace(JOB, sampling=Sampling(repetition_penalty=asked)))
    assert fake.requests[0].json["repetition_penalty"] == sent


async def test_the_stop_token_stays_hidden(backend: MlxServerBackend) -> None:
    last = (await collect(backend))[-1]
    assert (last.finish, last.stop_token) == (FinishReason.STOP, None)
    found = (await backend.probe()).capabilities
    assert (found.prompt, found.output, found.stop_visible) == (OutputForm.TEXT, OutputForm.TEXT, False)


async def test_its_404_is_a_failure_of_its_own_and_shows_no_path(
    fake: FakeMlxServer, backend: MlxServerBackend
) -> None:
    fake.script = lambda asked: Refusal(404, b'{"error": "No safetensors in /Users/someone/models"}', version=0)
    with pytest.raises(BackendError) as caught:
        await collect(backend)
    assert type(caught.value) is BackendError
    assert "/Users" not in caught.value.message
    assert "/Users" in str(caught.value.__cause__)
    assert "model" not in caught.value.message


async def test_what_it_finds_wrong_in_a_request_is_a_rejection(fake: FakeMlxServer, backend: MlxServerBackend) -> None:
    fake.script = lambda asked: Refusal(400, b'{"error": "max_tokens must be at least 1"}', version=0)
    with pytest.raises(BackendRejected, match="max_tokens must be at least 1"):
        await collect(backend)


@pytest.mark.parametrize("wrong", [None, 7, ["a"]])
async def test_text_that_is_no_text_fails_the_answer(wrong: object) -> None:
    async with FakeMlxServer(pieces=["a", wrong]) as fake:
        backend = MlxServerBackend(BackendOptions("mlx_server", "m", fake.url))
        with pytest.raises(BackendError):
            await collect(backend)
        await backend.aclose()


async def test_a_dead_generation_thread_fails_the_probe(fake: FakeMlxServer, backend: MlxServerBackend) -> None:
    fake.healthy = False
    with pytest.raises(BackendOverloaded):
        await backend.probe()


async def test_leaving_before_the_head_lets_the_server_send_it() -> None:
    """mlx_lm.server generates to the limit for a client that is gone when it sends its head; behind it, it notices."""
    head = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    asked, left = asyncio.Event(), asyncio.Event()
    seen: list[object] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int((await reader.readuntil(b"\r\n\r\n")).lower().partition(b"content-length: ")[2].split()[0])
        await reader.readexactly(size)
        asked.set()
        try:
            seen.append(await reader.read())
            writer.write(head)
            await writer.drain()
            seen.append("head sent")
        except OSError as error:
            seen.append(error)
        left.set()

    async with listening(serve) as listener:
        backend = MlxServerBackend(BackendOptions("mlx_server", "m", listener.url))
        task = asyncio.create_task(collect(backend))
        async with asyncio.timeout(5):
            await asked.wait()
            task.cancel()
            await left.wait()
        await backend.aclose()
    assert seen == [b"", "head sent"]
