"""A backend that is asked only so much at once: the others wait in line, and the line is bounded too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from unisono.core.generation import Chunk, Generation
from unisono.core.ports import Backend
from unisono.core.probe import Probe
from unisono.errors import BackendOverloaded


class SlottedBackend:
    """A Backend around a Backend with `places` for generations at once.

    First come, first served. A generation that finds `max_queue` others waiting, or waits longer than
    `queue_timeout_s` seconds, raises BackendOverloaded. Leaving the line or the stream at any moment frees the place.
    """

    def __init__(self, backend: Backend, *, places: int, max_queue: int, queue_timeout_s: float) -> None:
        self._backend = backend
        self._places = asyncio.Semaphore(places)
        self._waiting = 0
        self._max_queue = max_queue
        self._queue_timeout_s = queue_timeout_s

    @property
    def full(self) -> bool:
        return self._places.locked()

    async def probe(self) -> Probe:
        return await self._backend.probe()

    async def complete(self, job: Generation) -> AsyncIterator[Chunk]:
        await self._take_place()
        try:
            chunks = self._backend.complete(job)
            # The port promises an iterator; every adapter gives a generator, which has to be closed with the stream.
            async with aclosing(chunks):  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
        finally:
            self._places.release()

    async def _take_place(self) -> None:
        if not self._places.locked():
            await self._places.acquire()
            return
        if self._waiting >= self._max_queue:
            raise BackendOverloaded("Too many requests are waiting for this model.", retry_after_s=1.0)
        self._waiting += 1
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await self._places.acquire()
        except TimeoutError:
            raise BackendOverloaded("No place became free for this model in time.", retry_after_s=1.0) from None
        finally:
            self._waiting -= 1

    async def aclose(self) -> None:
        await self._backend.aclose()
