"""Event log of one running response.

Events and their tokens are written together, in batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import suppress

import orjson

from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.outbound.dialects import OPENAI, Dialect
from unisono.api.responses.outbound.serializer import WireEvent
from unisono.api.responses.persistence import retry_while_down
from unisono.core.state_store import NOTHING_LOGGED, EventPage, Lease, LogWrite, Store
from unisono.errors import NotFound

# Pauses in seconds between write attempts while the store does not answer. Generation waits during these pauses, so
# that it does not run ahead of the log.
PATIENCE_S = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0)
# Maximum number of unwritten events before the generation has to wait.
MAX_PENDING_EVENTS = 256
# Maximum size of the unwritten events in bytes.
MAX_PENDING_BYTES = 256 * 1024


class GrowingLog:
    """Writer of the event log of one response.

    Events are written in order, and a batch is never split, so that the stored tokens always match the stored events.
    `pause_s` returns how many seconds to wait for further events before a write.
    """

    def __init__(
        self,
        deps: ResponsesDeps,
        lease: Lease,
        response_id: str,
        *,
        events: int,
        tokens: int,
        pause_s: Callable[[], float],
    ) -> None:
        """Create a writer. The store already has `events` events and `tokens` tokens."""
        self._deps = deps
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
        self._write_lock = asyncio.Lock()

    def add(self, events: Sequence[WireEvent], tokens: Sequence[int]) -> None:
        """Buffer a batch for writing: its events, and the tokens generated since the previous batch."""
        self._events += (event.data for event in events)
        self._size += sum(len(event.data) for event in events)
        self._tokens += tokens
        if self._waits:
            self._dirty.set()

    def skip(self, events: int) -> None:
        """Start the log after its first `events` events, which were stored with the record."""
        self._written = (events, 0)

    @property
    def is_behind(self) -> bool:
        """True if so many events are unwritten that the generation has to wait."""
        return len(self._events) >= MAX_PENDING_EVENTS or self._size >= MAX_PENDING_BYTES

    @property
    def _waits(self) -> bool:
        return bool(self._events or self._tokens)

    async def keep_writing(self) -> None:
        """Write added events until `close` is called.

        Raises StoreError if the lease is lost, the response was deleted, or the store did not answer for too long.
        """
        while not self._closed.is_set():
            await self._dirty.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._closed.wait()
                    return
            await self.flush()

    def close(self) -> None:
        """Stop writing the log after the current write.

        A write in progress is not cancelled, because that would close its connection to the store.
        """
        self._closed.set()
        self._dirty.set()

    async def flush(self) -> None:
        """Write all pending events.

        An interrupted write is repeated unchanged, because it may have succeeded.
        """
        async with self._write_lock:
            while self._waits:
                self._sent = self._sent or self.rest()
                await self._write(self._sent)
                self._sent = None
            self._dirty.clear()

    async def _write(self, write: LogWrite) -> None:
        await retry_while_down(lambda: self._deps.store.log(self._lease, self._response_id, write), PATIENCE_S)
        del self._events[: len(write.events)]
        self._size -= sum(map(len, write.events))
        del self._tokens[: len(write.tokens)]
        self._written = (write.first_event + len(write.events), write.first_token + len(write.tokens))

    async def settle(self) -> None:
        """Finish an interrupted write. Afterwards `rest` returns exactly what the store lacks."""
        if self._sent is not None:
            await self.flush()

    def rest(self) -> LogWrite:
        """Return the unwritten events and tokens, for the last transaction."""
        first_event, first_token = self._written
        return LogWrite(first_event, tuple(self._events), first_token, tuple(self._tokens))

    async def check_ownership(self) -> None:
        """Check that the response exists and that this owner may write to it.

        Raises StoreConflict if another process owns it, NotFound if it was deleted, and StoreError if the store fails.
        """
        await self._deps.store.log(self._lease, self._response_id, NOTHING_LOGGED)


# Reader of a response's event log, independent of the process that generates the response.

# Maximum time that one read waits for more events, in seconds.
WAIT_S = 5.0
# Maximum number of events of one read.
PAGE = 256
# The first page is small, so that a reader gets its first events early.
FIRST_PAGE = 16
# Target size of one read in bytes. The number of events per read is estimated from the size of earlier events. The size
# is limited, because a slow reader holds the whole result of a read in memory.
PAGE_BYTES = 64 * 1024


async def logged_events(
    store: Store, tenant: str, response_id: str, dialect: Dialect, *, starting_after: int | None = None
) -> AsyncGenerator[list[WireEvent]]:
    """Yield the logged events of a response, in order, until the response has ended.

    `starting_after` is the 0-based number of an event: only later events are yielded. If the response has ended without
    later events, yields one empty list. Yields nothing if there is no log. Waits while the store does not answer.
    Raises NotFound if the response is deleted while the log is being read.
    """
    has_sent_events = False
    limit = FIRST_PAGE
    first = 0 if starting_after is None else starting_after + 1

    async def read() -> EventPage | None:
        return await store.events(tenant, response_id, first, limit=limit, wait_s=WAIT_S)

    while True:
        page = await retry_while_down(read, PATIENCE_S)
        if page is None:
            if has_sent_events:
                raise NotFound("The response was deleted while its events were being read.", param="response_id")
            return
        if page.events:
            for chunk in slices(page.events):
                yield [to_event(data, number, dialect) for number, data in enumerate(chunk, first)]
                first += len(chunk)
            limit = max(1, min(PAGE, PAGE_BYTES * len(page.events) // sum(map(len, page.events))))
            has_sent_events = True
        if page.ended:
            if not has_sent_events:
                yield []
            return


def slices(events: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Split `events` into lists of at most `PAGE_BYTES`; a larger event gets a list of its own."""
    chunk: list[bytes] = []
    size = 0
    for data in events:
        if chunk and size + len(data) > PAGE_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(data)
        size += len(data)
    yield chunk


def to_event(data: bytes, number: int, dialect: Dialect) -> WireEvent:
    """Convert logged JSON (OpenAI's dialect) to an event in `dialect`; `number` is 0-based."""
    if dialect is OPENAI:
        # The type is the first member: `{"type":"response.created",...`.
        return WireEvent(number, data[9 : data.index(b'"', 9)].decode(), data)
    event = dialect.translated(orjson.loads(data))
    return WireEvent(number, event["type"], orjson.dumps(event))
