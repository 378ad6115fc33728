"""Records of requests and generations, written to the store in the background.

Records wait briefly in a queue, so that many are written together. If the queue is full, records are dropped. If a
write fails, it is not repeated. Lost records are counted, except if the process is killed; then the records of its last
quarter of a second are lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection
from typing import Final

from unisono.core.observer import GenerationDone, GenerationStarted, Observer
from unisono.core.request_record import GENERATIONS, RequestRecord
from unisono.core.request_store import RequestStore
from unisono.errors import UnisonoError

log = logging.getLogger("unisono.observe")

MAX_QUEUED: Final = 20_000
RECORDS_PER_WRITE: Final = 500
# Time that the first record of a batch waits for others, in seconds.
GATHER_S: Final = 0.25
# Status of a request for an object that does not exist, or does not exist yet.
NOT_FOUND: Final = 404
UNAUTHORIZED: Final = 401
# Time for writing the queue at shutdown, in seconds.
CLOSING_S: Final = 3.0


class RequestWriter:
    """Receiver of request records that writes them to the store.

    Records are stored for `for_s` seconds, and at most `most` of them. `count` is called with outcomes and numbers of
    records. Requests to the routes `probes` are stored only if their key is wrong. Requests to the routes `unrecorded`
    are stored only if they fail with a status other than 404. A request whose answer has a record of its own is not
    stored.
    """

    def __init__(
        self,
        store: RequestStore,
        *,
        for_s: float,
        most: int,
        count: Callable[[str, int], None],
        probes: Collection[str] = (),
        unrecorded: Collection[str] = (),
    ) -> None:
        self._probes = frozenset(probes)
        self._unrecorded = frozenset(unrecorded)
        self._store = store
        self._retention_s = for_s
        self._max_records = most
        self._count = count
        self._waiting: deque[RequestRecord] = deque()
        self._write_task: asyncio.Task[None] | None = None
        self._is_down = False

    def __call__(self, record: RequestRecord) -> None:
        # The record of the answer has the same id, by which clients look up the tokens and the cost.
        if record.separate_answer:
            return
        # A probe may fail while the gateway starts, which is not a failed request of a client. A wrong key is always
        # recorded.
        if record.route in self._probes and record.status != UNAUTHORIZED:
            return
        if (record.status < 400 or record.status == NOT_FOUND) and record.route in self._unrecorded:
            return
        if len(self._waiting) >= MAX_QUEUED:
            self._count("dropped", 1)
            return
        self._waiting.append(record)
        if self._write_task is None or self._write_task.done():
            self._write_task = asyncio.create_task(self._write_soon(), name="storing request records")

    async def _write_soon(self) -> None:
        # Records that arrive during a write wait again for others, because many small writes cost more than a few large
        # ones.
        while self._waiting:
            await asyncio.sleep(GATHER_S)
            await self._write()

    async def _write(self) -> None:
        """Write the records that are in the queue now."""
        left = len(self._waiting)
        while left:
            batch = [self._waiting.popleft() for _ in range(min(RECORDS_PER_WRITE, left))]
            left -= len(batch)
            try:
                await self._store.keep_requests(*batch, for_s=self._retention_s, most=self._max_records)
            except asyncio.CancelledError:
                self._count("dropped", len(batch))
                raise
            except UnisonoError as error:
                if not self._is_down:
                    log.warning(
                        "request records cannot be stored at the moment; they are dropped", extra={"code": error.code}
                    )
                self._is_down = True
                self._count("failed", len(batch))
            except Exception as error:
                log.exception("storing request records failed", exc_info=error)
                self._count("failed", len(batch))
            else:
                self._is_down = False
                self._count("kept", len(batch))

    async def _write_all(self) -> None:
        while self._waiting:
            await self._write()

    async def aclose(self) -> None:
        """Write the queued records, but give up after a short timeout."""
        if self._write_task is not None and not self._write_task.done():
            self._write_task.cancel()
            await asyncio.gather(self._write_task, return_exceptions=True)
        last = asyncio.create_task(self._write_all(), name="storing the last request records")
        await asyncio.wait({last}, timeout=CLOSING_S)
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)
        if self._waiting:
            self._count("dropped", len(self._waiting))


class GenerationRecords(Observer):
    """Observer that adds each generation to the record of its request or answer."""

    def generation_started(self, began: GenerationStarted) -> None:
        """Do nothing: records contain generations that have ended."""

    def ended(self, done: GenerationDone) -> None:
        generations = GENERATIONS.get()
        if generations is not None:
            generations.append(done)
