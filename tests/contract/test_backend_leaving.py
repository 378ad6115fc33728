"""What every Backend promises when it has to stop: whoever leaves and whatever takes too long frees the other side."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.kinds import (
    AT_ONCE_S,
    JOB,
    Deaf,
    Kind,
    collect,
    collect_until_failure,
    drain,
    forever,
    point,
)
from tests.fakes import (
    Reset,
    WireServer,
    inject_at,
    recut,
    stall_at,
)
from unisono.core.generation import Chunk, CompletionJob, Prompt, Timeouts
from unisono.core.ports import Backend
from unisono.core.tasks import cancel_and_wait
from unisono.errors import (
    BackendError,
    BackendTimeout,
    BackendUnavailable,
)

# Leaving


async def _leave(backend: Backend, server: WireServer | None = None, job: CompletionJob = JOB) -> float:
    """Start reading, cancel a moment after the request has come, and say when that was."""
    task = asyncio.create_task(collect(backend, job))
    if server is not None:
        await server.asked()
    await asyncio.sleep(0.05)
    left = asyncio.get_running_loop().time()
    await cancel_and_wait(task)
    assert asyncio.get_running_loop().time() - left < AT_ONCE_S
    return left


async def test_leaving_while_the_connection_is_made(wired: Kind) -> None:
    with Deaf() as url:
        backend = point(wired, url)
        await _leave(backend)
        await backend.aclose()


async def test_leaving_before_the_first_byte_drops_the_socket_at_once(wired: Kind) -> None:
    async with WireServer(lambda seen: [Reset()] if seen.method == "GET" else [*forever()]) as server:
        backend = point(wired, server)
        left = await _leave(backend, server)
        assert await server.gone() - left < AT_ONCE_S
        await backend.aclose()


async def test_leaving_between_headers_and_first_token_drops_the_socket_at_once(wired: Kind, tmp_path: Path) -> None:
    async with wired.serve(tmp_path, faults=(stall_at(0),)) as (backend, fake):
        left = await _leave(backend, fake)
        assert await fake.gone() - left < AT_ONCE_S


async def test_leaving_while_a_long_prompt_is_being_sent_drops_the_socket_at_once(wired: Kind, tmp_path: Path) -> None:
    long = Prompt(tokens=[199000] * 2_000_000, text="word " * 4_000_000)
    async with wired.serve(tmp_path, reads_body=False) as (backend, fake):
        left = await _leave(backend, fake, replace(JOB, prompt=long))
        assert await fake.gone() - left < AT_ONCE_S


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_leaving_mid_stream_drops_the_socket_at_once(wired: Kind, how: str, tmp_path: Path) -> None:
    async with wired.serve(tmp_path, faults=(stall_at(3),)) as (backend, fake):
        stream = backend.complete(JOB)
        await anext(stream)
        if how == "close":
            left = asyncio.get_running_loop().time()
            await stream.aclose()  # type: ignore[attr-defined]
        else:
            task = asyncio.ensure_future(drain(stream))
            await asyncio.sleep(0.05)
            left = asyncio.get_running_loop().time()
            await cancel_and_wait(task)
        assert await fake.gone() - left < AT_ONCE_S
        assert fake.requests[0].done_at is None


async def test_leaving_at_any_chunk_is_quick(kind: Kind, tmp_path: Path) -> None:
    async with kind.serve(tmp_path, delay_s=0.001, per_chunk=4) as (backend, _):
        for reads in range(5):
            stream = backend.complete(JOB)
            for _ in range(reads):
                await anext(stream, None)
            async with asyncio.timeout(AT_ONCE_S):
                await stream.aclose()  # type: ignore[attr-defined]


async def testclosing_the_backend_twice_is_harmless_and_ends_what_runs(kind: Kind, tmp_path: Path) -> None:
    async with kind.serve(tmp_path) as (backend, _):
        await collect(backend)
        await backend.aclose()
        await backend.aclose()


async def test_a_backend_that_is_closed_fails_its_generations_and_opens_nothing(wired: Kind, tmp_path: Path) -> None:
    async with wired.serve(tmp_path, faults=(stall_at(3),)) as (backend, fake):
        task = asyncio.create_task(collect_until_failure(backend))
        await fake.asked()
        await asyncio.sleep(0.05)
        await backend.aclose()
        async with asyncio.timeout(AT_ONCE_S):
            _, error = await task
        assert isinstance(error, BackendError)
        await fake.gone()
        assert fake.open == 0
        with pytest.raises(BackendUnavailable):
            await collect(backend)
        with pytest.raises(BackendUnavailable):
            await backend.probe()
        assert fake.connections == 1


# Time

PATIENT = Timeouts(connect_s=5, first_token_s=5, silence_s=5, total_s=5)


async def _timed_out(backend: Backend, timeouts: Timeouts) -> list[Chunk]:
    started = asyncio.get_running_loop().time()
    chunks, error = await collect_until_failure(backend, replace(JOB, timeouts=timeouts))
    assert type(error) is BackendTimeout
    assert asyncio.get_running_loop().time() - started < 1.0
    return chunks


async def test_a_connection_that_is_not_accepted_runs_out_of_time(wired: Kind) -> None:
    with Deaf() as url:
        backend = point(wired, url)
        assert await _timed_out(backend, replace(PATIENT, connect_s=0.1)) == []
        await backend.aclose()


@pytest.mark.parametrize("after", ["silent", "comment"])
async def test_no_first_token_runs_out_of_time(wired: Kind, after: str, tmp_path: Path) -> None:
    comment = (inject_at(0, wired.speaks.nothing),) if after == "comment" else ()
    async with wired.serve(tmp_path, faults=(*comment, stall_at(0))) as (backend, fake):
        assert await _timed_out(backend, replace(PATIENT, first_token_s=0.1)) == []
        await fake.gone(within=AT_ONCE_S)


async def test_no_headers_run_out_of_time(wired: Kind) -> None:
    async with WireServer(lambda seen: forever()) as server:
        backend = point(wired, server)
        assert await _timed_out(backend, replace(PATIENT, first_token_s=0.1)) == []
        await server.gone(within=AT_ONCE_S)
        await backend.aclose()


async def test_comments_are_no_tokens(wired: Kind, tmp_path: Path) -> None:
    comments = [inject_at(0, wired.speaks.nothing) for _ in range(100)]
    async with wired.serve(tmp_path, faults=(*comments, recut(20, 0.01))) as (backend, _):
        assert await _timed_out(backend, replace(PATIENT, first_token_s=0.15)) == []


async def test_silence_in_mid_answer_runs_out_of_time(wired: Kind, tmp_path: Path) -> None:
    async with wired.serve(tmp_path, faults=(stall_at(3),)) as (backend, fake):
        heard = await _timed_out(backend, replace(PATIENT, silence_s=0.1))
        assert wired.delivered(heard) or not wired.live
        await fake.gone(within=AT_ONCE_S)


async def test_a_steady_answer_that_takes_too_long_runs_out_of_time(wired: Kind, tmp_path: Path) -> None:
    async with wired.serve(tmp_path, per_chunk=1, delay_s=0.03) as (backend, fake):
        heard = await _timed_out(backend, replace(PATIENT, total_s=0.2))
        assert wired.delivered(heard) or not wired.live
        await fake.gone(within=AT_ONCE_S)


@pytest.mark.slow
async def test_a_slow_reader_is_not_a_silent_backend(wired: Kind, tmp_path: Path) -> None:
    async with wired.serve(tmp_path, per_chunk=8, delay_s=0.01) as (backend, _):
        chunks = []
        async for chunk in backend.complete(replace(JOB, timeouts=replace(PATIENT, silence_s=0.1))):
            chunks.append(chunk)
            if len(chunks) < 3:
                await asyncio.sleep(0.25)
    assert wired.delivered(chunks) == wired.answer
