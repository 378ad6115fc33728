"""Concurrent generation of several choices, streamed or collected into one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Protocol

from unisono.core.events import Event
from unisono.core.tasks import cancel_all
from unisono.engine.collect import CollectedAnswer, collect_run
from unisono.engine.request import GenerationRequest, GenerationService, GenerationStream


class Chunks(Protocol):
    def write(self, index: int, batch: Sequence[Event]) -> bytes:
        """Return the bytes for one batch of choice `index`."""
        ...


class ChunkSource:
    """Bytes of a stream, one step per batch of any generation."""

    def __init__(self, streams: Sequence[GenerationStream], chunks: Chunks) -> None:
        self._streams = streams
        self._chunks = chunks
        self._steps = self._generate()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._steps

    async def aclose(self) -> None:
        """Release the backends of all generations, even if nothing was read from this source."""
        await self._steps.aclose()
        await close_all(self._streams)

    async def _generate(self) -> AsyncGenerator[bytes, None]:
        # The usual case needs no tasks and no queue.
        if len(self._streams) == 1:
            async for batch in self._streams[0]:
                yield self._chunks.write(0, batch)
            return
        batches = merged(self._streams)
        try:
            async for index, batch in batches:
                yield self._chunks.write(index, batch)
        finally:
            await batches.aclose()


async def merged(streams: Sequence[GenerationStream]) -> AsyncGenerator[tuple[int, list[Event]], None]:
    """Yield the batches of all generations on arrival, with the index of the generation.

    The next batch of a generation is read only after the previous one was consumed. The first failure ends all
    generations.
    """
    iterators = [aiter(stream) for stream in streams]
    pending: dict[asyncio.Task[list[Event] | None], int] = {}

    async def step(index: int) -> list[Event] | None:
        return await anext(iterators[index], None)

    for index in range(len(streams)):
        pending[asyncio.create_task(step(index))] = index
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                batch = task.result()
                index = pending.pop(task)
                if batch is not None:
                    pending[asyncio.create_task(step(index))] = index
                    yield index, batch
    finally:
        await cancel_all(*pending)


async def collect_all(streams: Sequence[GenerationStream]) -> list[CollectedAnswer]:
    """Collect all generations concurrently.

    The first failure ends all. Their backends are released when this returns.
    """
    if len(streams) == 1:
        # The usual case needs no tasks.
        try:
            return [await collect_run(streams[0])]
        finally:
            await streams[0].aclose()
    tasks = [asyncio.create_task(collect_run(stream)) for stream in streams]
    try:
        return await asyncio.gather(*tasks)
    finally:
        # After a failure the others still run. They must end before their streams are closed.
        await cancel_all(*tasks)
        await close_all(streams)


async def start_all(service: GenerationService, choices: Iterable[GenerationRequest]) -> list[GenerationStream]:
    """Start all generations. If one fails to start, those already started are closed."""
    streams: list[GenerationStream] = []
    try:
        streams += map(service.start, choices)
    except BaseException:
        await close_all(streams)
        raise
    return streams


async def close_all(streams: Sequence[GenerationStream]) -> None:
    for stream in streams:
        await stream.aclose()
