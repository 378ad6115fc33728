"""Selection of answers to record, and asynchronous writing of recordings to the store.

Ended generations wait briefly in a short queue, so that several are written together. A task converts them to
documents, long ones in a thread, and stores them. Recordings are dropped if the queue is full, and not retried if the
store fails; both are counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from unisono.core.observer import GenerationDone, GenerationStarted, Observer
from unisono.core.recordings import StoredTrace, TraceStore
from unisono.errors import UnisonoError
from unisono.observe.recording import packed, summary_of, to_document

log = logging.getLogger("unisono.observe")

MAX_QUEUED: Final = 64
# Recordings written in one batch.
RECORDINGS_PER_WRITE: Final = 16
# Time in seconds for which the first recording of a batch waits for others.
GATHER_S: Final = 0.1
# Number of tokens from which a document is built in a thread. For fewer tokens, waking a thread (0.1 ms) takes longer.
OFF_LOOP_TOKENS: Final = 2_000
# Time for writing the queue at shutdown, in seconds.
CLOSING_S: Final = 3.0

# Rules that apply to every answer of some backends. They are not a reason to record an answer.
ROUTINE: Final = frozenset({"restored-stop"})


def had_recoveries(done: GenerationDone) -> bool:
    return bool({*done.recoveries, *(repair.rule for repair in done.repairs)} - ROUTINE)


# Predicates that select generations to record, by `unisono.traces.mode`.
MODES: Final[dict[str, Callable[[GenerationDone], bool]]] = {
    "off": lambda _: False,
    # A request that failed before its first attempt is not recorded: many of them would evict the relevant recordings.
    "recoveries": lambda done: bool(
        had_recoveries(done) or done.failovers or done.unmet or (done.error and done.tries)
    ),
    "all": lambda _: True,
}


def is_long(done: GenerationDone) -> bool:
    """Return True if building the document may be slow.

    Many tokens take time, and so do the schemas of tools and formats.
    """
    recorded = done.start.recorded_request or {}
    tokens = len(done.journal) + sum(len(step.prompt) for step in done.steps)
    return tokens > OFF_LOOP_TOKENS or bool(recorded.get("tools") or recorded.get("form"))


class Recorder(Observer):
    """Observer that records answers.

    Recordings are stored for `for_s` seconds, and at most `most` recordings are stored per tenant. `max_bytes` is the
    maximum size of a recording as JSON. `count` is called with outcomes and numbers of recordings.
    """

    def __init__(
        self,
        store: TraceStore,
        mode: str,
        *,
        for_s: float,
        max_bytes: int,
        most: int,
        gateway: str,
        count: Callable[[str, int], None],
    ) -> None:
        self._store = store
        self._should_record = MODES[mode]
        self._retention_s = for_s
        self._max_bytes = max_bytes
        self._max_recordings = most
        self._gateway = gateway
        self._count = count
        self._waiting: deque[GenerationDone] = deque()
        self._write_task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._down = False

    def generation_started(self, began: GenerationStarted) -> None:
        """Do nothing: a recording is written when a generation ends."""

    def ended(self, done: GenerationDone) -> None:
        if not done.start.request_id or not self._should_record(done):
            return
        # Recordings are optional: when the store is slow, they are dropped instead of held in memory.
        if len(self._waiting) >= MAX_QUEUED:
            self._count("dropped", 1)
            return
        self._waiting.append(done)
        if len(self._waiting) >= RECORDINGS_PER_WRITE:
            self._start_write()
        # Collect recordings for a moment, so that one transaction writes several.
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._start_write)

    def _start_write(self) -> None:
        """Start writing the queue, unless a write is in progress."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting and (self._write_task is None or self._write_task.done()):
            self._write_task = asyncio.create_task(self._write(), name="recording answers")

    async def aclose(self) -> None:
        """Write the queued recordings, but give up after a short timeout."""
        self._start_write()
        if self._write_task is not None:
            await asyncio.wait({self._write_task}, timeout=CLOSING_S)
            self._write_task.cancel()
            await asyncio.gather(self._write_task, return_exceptions=True)
        if self._waiting:
            self._count("dropped", len(self._waiting))

    async def _write(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(RECORDINGS_PER_WRITE, len(self._waiting)))]
            try:
                traces = [await self._traced(done) for done in batch]
                await self._store.keep_traces(*traces, for_s=self._retention_s, most=self._max_recordings)
            except asyncio.CancelledError:
                self._count("dropped", len(batch))
                raise
            except UnisonoError as error:
                if not self._down:
                    log.warning(
                        "recordings cannot be stored at the moment; they are dropped", extra={"code": error.code}
                    )
                self._down = True
                self._count("failed", len(batch))
            except Exception as error:
                log.exception("storing a recording failed", exc_info=error)
                self._count("failed", len(batch))
            else:
                self._down = False
                self._count("kept", len(batch))

    async def _traced(self, done: GenerationDone) -> StoredTrace:
        if is_long(done):
            return await asyncio.to_thread(self._trace, done)
        # Let other tasks run before the next document is built.
        await asyncio.sleep(0)
        return self._trace(done)

    def _trace(self, done: GenerationDone) -> StoredTrace:
        start, document = done.start, to_document(done, self._gateway, self._max_bytes)
        return StoredTrace(start.tenant, start.request_id, start.at, summary_of(document), packed(document))
