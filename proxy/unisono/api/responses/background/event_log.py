"""The log of one running response: events and the tokens they came from, written together, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.outbound.serializer import WireEvent
from unisono.api.responses.persistence import insisting
from unisono.core.state_store import NOTHING_LOGGED, Lease, LogWrite

PATIENCE_S = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0)
"""Between tries while the store does not answer. The backend waits meanwhile: what cannot be logged is not made."""
MOST_PENDING = 256
"""Events that may wait to be written before the run waits for them."""
MOST_PENDING_BYTES = 256 * 1024
"""Bytes of them."""


class GrowingLog:
    """What is written has gone out of here in order and in whole batches, so the tokens in the store are always those
    of the events in the store. `pause_s` is asked how many seconds further events are waited for before a write."""

    def __init__(
        self,
        means: ResponsesDeps,
        lease: Lease,
        response_id: str,
        *,
        events: int,
        tokens: int,
        pause_s: Callable[[], float],
    ) -> None:
        """`events` and `tokens` are how many are in the store already."""
        self._means = means
        self._lease = lease
        self._response_id = response_id
        self._written = (events, tokens)
        self._pause_s = pause_s
        self._events: list[bytes] = []
        self._size = 0
        self._tokens: list[int] = []
        self._sent: LogWrite | None = None
        self._dirty = asyncio.Event()
        self._closed = asyncio.Event()
        self._writing = asyncio.Lock()

    def add(self, events: Sequence[WireEvent], tokens: Sequence[int]) -> None:
        """One batch: its events and the tokens since the last one."""
        self._events += (event.data for event in events)
        self._size += sum(len(event.data) for event in events)
        self._tokens += tokens
        if self._waits:
            self._dirty.set()

    def skip(self, events: int) -> None:
        """So many events are in the store by other means."""
        self._written = (events, 0)

    @property
    def behind(self) -> bool:
        """Whether so much waits that the run should too."""
        return len(self._events) >= MOST_PENDING or self._size >= MOST_PENDING_BYTES

    @property
    def _waits(self) -> bool:
        return bool(self._events or self._tokens)

    async def keep_writing(self) -> None:
        """Write what comes, until closed. Raises the StoreError family: the lease is lost, the response was deleted,
        or the store did not answer for too long."""
        while not self._closed.is_set():
            await self._dirty.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._closed.wait()
                    return
            await self.flush()

    def close(self) -> None:
        """Begin no further write. One that is on its way is not cut short, which would cost its connection."""
        self._closed.set()
        self._dirty.set()

    async def flush(self) -> None:
        """Write all there is. A write that was cut short is repeated as it was: it may have been done."""
        async with self._writing:
            while self._waits:
                self._sent = self._sent or self.rest()
                await self._write(self._sent)
                self._sent = None
            self._dirty.clear()

    async def _write(self, write: LogWrite) -> None:
        await insisting(lambda: self._means.store.log(self._lease, self._response_id, write), PATIENCE_S)
        del self._events[: len(write.events)]
        self._size -= sum(map(len, write.events))
        del self._tokens[: len(write.tokens)]
        self._written = (write.first_event + len(write.events), write.first_token + len(write.tokens))

    async def settle(self) -> None:
        """Finish a write that was cut short, so that what is left is exactly `rest`."""
        if self._sent is not None:
            await self.flush()

    def rest(self) -> LogWrite:
        """What is not written yet."""
        first_event, first_token = self._written
        return LogWrite(first_event, tuple(self._events), first_token, tuple(self._tokens))

    async def ask(self) -> None:
        """Return when the response is there and still this owner's to write. Raises the StoreError family."""
        await self._means.store.log(self._lease, self._response_id, NOTHING_LOGGED)
