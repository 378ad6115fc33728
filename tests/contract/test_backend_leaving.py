"""Contract of every backend for cancellation, shutdown and timeouts: each frees the server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.kinds import (
    AT_ONCE_S,
    JOB,
    FullBacklog,
    Kind,
    backend_at,
    collect,
    collect_until_failure,
    drain,
    stall_steps,
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

# Cancellation


async def _cancel(backend: Backend, server: WireServer | None = None, job: CompletionJob = JOB) -> float:
    """Start a generation, cancel it shortly after the request arrived, and return that time."""
    task = asyncio.create_task(collect(backend, job))
    if server is not None:
        await server.asked()
    await asyncio.sleep(0.05)
    cancelled_at = asyncio.get_running_loop().time()
    await cancel_and_wait(task)
    assert asyncio.get_running_loop().time() - cancelled_at < AT_ONCE_S
    return cancelled_at


async def test_cancelling_during_the_connection_is_immediate(wired: Kind) -> None:
    with FullBacklog() as url:
        backend = backend_at(wired, url)
        await _cancel(backend)
        await backend.aclose()


async def test_cancelling_before_the_first_byte_closes_the_socket(wired: Kind) -> None:
    async with WireServer(lambda seen: [Reset()] if seen.method == "GET" else [*stall_steps()]) as server:
        backend = backend_at(wired, server)
        cancelled_at = await _cancel(backend, server)
        assert await server.gone() - cancelled_at < AT_ONCE_S
        await backend.aclose()


async def test_cancelling_between_headers_and_first_token_closes_the_socket(wired: Kind, tmp_path: Path) -> None:
    async with wired.serve(tmp_path, faults=(stall_at(0),)) as (backend, fake):
        cancelled_at = await _cancel(backend, fake)
        assert await fake.gone() - cancelled_at < AT_ONCE_S


async def test_cancelling_while_a_long_prompt_is_sent_closes_the_socket(wired: Kind, tmp_path: Path) -> None:
    long_prompt = Prompt(tokens=[199000] * 2_000_000, text="word " * 4_000_000)
    async with wired.serve(tmp_path, reads_body=False) as (backend, fake):
        cancelled_at = await _cancel(backend, fake, replace(JOB, prompt=long_prompt))
        assert await fake.gone() - cancelled_at < AT_ONCE_S


@pytest.mark.parametrize("method", ["cancel", "close"])
async def test_cancelling_or_closing_a_stream_closes_the_socket(wired: Kind, method: str, tmp_path: Path) -> None:
    async with wired.serve(tmp_path, faults=(stall_at(3),)) as (backend, fake):
        stream = backend.complete(JOB)
        await anext(stream)
        if method == "close":
            cancelled_at = asyncio.get_running_loop().time()
            await stream.aclose()  # type: ignore[attr-defined]
        else:
            task = asyncio.ensure_future(drain(stream))
            await asyncio.sleep(0.05)
            cancelled_at = asyncio.get_running_loop().time()
            await cancel_and_wait(task)
        assert await fake.gone() - cancelled_at < AT_ONCE_S
        assert fake.requests[0].done_at is None


async def test_closing_after_any_chunk_is_immediate(kind: Kind, tmp_path: Path) -> None:
    async with kind.serve(tmp_path, delay_s=0.001, per_chunk=4) as (backend, _):
        for reads in range(5):
            stream = backend.complete(JOB)
            for _ in range(reads):
                await anext(stream, None)
            async with asyncio.timeout(AT_ONCE_S):
                await stream.aclose()  # type: ignore[attr-defined]


async def test_closing_an_idle_backend_twice_is_harmless(kind: Kind, tmp_path: Path) -> None:
    async with kind.serve(tmp_path) as (backend, _):
        await collect(backend)
        await backend.aclose()
        await backend.aclose()


async def test_closed_backend_fails_running_and_new_requests(wired: Kind, tmp_path: Path) -> None:
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


# Timeouts

LONG_TIMEOUTS = Timeouts(connect_s=5, first_token_s=5, silence_s=5, total_s=5)


async def _timed_out(backend: Backend, timeouts: Timeouts) -> list[Chunk]:
    started = asyncio.get_running_loop().time()
    chunks, error = await collect_until_failure(backend, replace(JOB, timeouts=timeouts))
    assert type(error) is BackendTimeout
    assert asyncio.get_running_loop().time() - started < 1.0
    return chunks


async def test_connection_not_accepted_exceeds_the_connect_timeout(wired: Kind) -> None:
    with FullBacklog() as url:
        backend = backend_at(wired, url)
        assert await _timed_out(backend, replace(LONG_TIMEOUTS, connect_s=0.1)) == []
        await backend.aclose()


@pytest.mark.parametrize("after", ["silent", "comment"])
async def test_missing_first_token_exceeds_the_first_token_timeout(wired: Kind, after: str, tmp_path: Path) -> None:
    comment = (inject_at(0, wired.dialect.no_event),) if after == "comment" else ()
    async with wired.serve(tmp_path, faults=(*comment, stall_at(0))) as (backend, fake):
        assert await _timed_out(backend, replace(LONG_TIMEOUTS, first_token_s=0.1)) == []
        await fake.gone(within=AT_ONCE_S)


async def test_missing_headers_exceed_the_first_token_timeout(wired: Kind) -> None:
    async with WireServer(lambda seen: stall_steps()) as server:
        backend = backend_at(wired, server)
        assert await _timed_out(backend, replace(LONG_TIMEOUTS, first_token_s=0.1)) == []
        await server.gone(within=AT_ONCE_S)
        await backend.aclose()


async def test_comments_do_not_count_as_the_first_token(wired: Kind, tmp_path: Path) -> None:
    comments = [inject_at(0, wired.dialect.no_event) for _ in range(100)]
    async with wired.serve(tmp_path, faults=(*comments, recut(20, 0.01))) as (backend, _):
        assert await _timed_out(backend, replace(LONG_TIMEOUTS, first_token_s=0.15)) == []


async def test_silence_during_an_answer_exceeds_the_silence_timeout(wired: Kind, tmp_path: Path) -> None:
    async with wired.serve(tmp_path, faults=(stall_at(3),)) as (backend, fake):
        chunks = await _timed_out(backend, replace(LONG_TIMEOUTS, silence_s=0.1))
        assert wired.delivered(chunks) or not wired.live
        await fake.gone(within=AT_ONCE_S)


async def test_slow_but_steady_answer_exceeds_the_total_timeout(wired: Kind, tmp_path: Path) -> None:
    async with wired.serve(tmp_path, per_chunk=1, delay_s=0.03) as (backend, fake):
        chunks = await _timed_out(backend, replace(LONG_TIMEOUTS, total_s=0.2))
        assert wired.delivered(chunks) or not wired.live
        await fake.gone(within=AT_ONCE_S)


@pytest.mark.slow
async def test_slow_reader_does_not_cause_a_silence_timeout(wired: Kind, tmp_path: Path) -> None:
    async with wired.serve(tmp_path, per_chunk=8, delay_s=0.01) as (backend, _):
        chunks = []
        async for chunk in backend.complete(replace(JOB, timeouts=replace(LONG_TIMEOUTS, silence_s=0.1))):
            chunks.append(chunk)
            if len(chunks) < 3:
                await asyncio.sleep(0.25)
    assert wired.delivered(chunks) == wired.answer
