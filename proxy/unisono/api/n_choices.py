"""Concurrent generation of several choices, streamed or collected into one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from unisono.api.collected_answer import CollectedAnswer, collect_run
from unisono.api.sse import EventSource, generation_source
from unisono.core.choice_group import ChoiceGroup
from unisono.core.events import Event
from unisono.core.tasks import cancel_all
from unisono.engine.request import GenerationRequest, GenerationService, GenerationStream


class Chunks(Protocol):
    def write(self, index: int, batch: Sequence[Event]) -> bytes:
        """Return the bytes for one batch of choice `index`."""
        ...


def chunk_source(streams: Sequence[GenerationStream], chunks: Chunks) -> EventSource[Any]:
    """Return a source that yields the chunks of all generations in one stream."""
    # The usual case needs no tasks.
    if len(streams) == 1:
        return generation_source(streams[0], partial(chunks.write, 0))
    return EventSource(MergedStreams(streams), lambda item: chunks.write(*item))


class MergedStreams:
    """Batches of several generations, as they arrive, each with its generation's 0-based index."""

    def __init__(self, streams: Sequence[GenerationStream]) -> None:
        self._streams = streams
        self._batches = merged(streams)

    def __aiter__(self) -> AsyncIterator[tuple[int, list[Event]]]:
        return self._batches

    async def aclose(self) -> None:
        """Release the backends of all generations, even if no batch was read."""
        await self._batches.aclose()
        await close_all(self._streams)


async def merged(streams: Sequence[GenerationStream]) -> AsyncGenerator[tuple[int, list[Event]], None]:
    """Yield the batches of all generations as they arrive, each with its generation's index.

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
    except Exception as error:
        _note_failure(streams, error)
        raise
    finally:
        await cancel_all(*pending)


async def collect_all(streams: Sequence[GenerationStream]) -> list[CollectedAnswer]:
    """Collect all generations concurrently.

    The first failure ends all generations. All backends are released when this function returns or raises.
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
    except Exception as error:
        _note_failure(streams, error)
        raise
    finally:
        # After the failure of one task, the other tasks still run. They must end before their streams are closed.
        await cancel_all(*tasks)
        await close_all(streams)


def _note_failure(streams: Sequence[GenerationStream], error: Exception) -> None:
    """Record in all reports that the streams ended because one choice failed with `error`."""
    for stream in streams:
        stream.report.facts.sibling_failure = error


async def start_all(service: GenerationService, choices: Iterable[GenerationRequest]) -> list[GenerationStream]:
    """Start all generations, which share one reservation.

    If one generation fails to start, the others are closed.
    """
    choices = [*choices]
    if len(choices) > 1:
        group = ChoiceGroup(len(choices))
        choices = [each.with_options(origin=replace(each.origin, choices=group)) for each in choices]
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
