"""Receivers of request records: the request log, the store, and files of JSON lines.

`GenerationRecords` first adds each generation to the record of its request.

Records for the store and for files wait briefly in a queue, so that many are written together. If the queue is full,
records are dropped. A failed write is not repeated. Lost records are counted. If the process is killed, the records of
its last quarter of a second are lost without being counted.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from random import random
from typing import Final

import orjson

from unisono.config.telemetry_settings import RequestLogSettings
from unisono.core.observer import GenerationDone, GenerationStarted, Observer
from unisono.core.request_record import GENERATIONS, RequestRecord, to_facts
from unisono.core.request_store import RequestStore
from unisono.errors import UnisonoError

log = logging.getLogger("unisono.observe")
request_log = logging.getLogger("unisono.requests")

MAX_QUEUED: Final = 20_000
RECORDS_PER_WRITE: Final = 500
# Time that the first record of a batch waits for others, in seconds.
GATHER_S: Final = 0.25
# Status of a request for an object that does not exist, or does not exist yet.
NOT_FOUND: Final = 404
UNAUTHORIZED: Final = 401
# Time for writing the queue at shutdown, in seconds.
CLOSING_S: Final = 3.0
# Only the gateway's own user may read the files.
FILE_MODE: Final = 0o600


class GenerationRecords(Observer):
    """Observer that adds each generation to the record of its request or answer."""

    def generation_started(self, began: GenerationStarted) -> None:
        """Do nothing: records contain generations that have ended."""

    def ended(self, done: GenerationDone) -> None:
        generations = GENERATIONS.get()
        if generations is not None:
            generations.append(done)


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


class RequestFile:
    """Receiver of records that appends them as JSON lines to the file `path`.

    Several processes may share the file. A thread appends the queued records. For each batch, it locks a separate file
    in the same folder. Therefore no process appends to a file that another process is rotating.

    Before the file exceeds `max_bytes`, it is renamed to `path.1`, and `path.1` to `path.2`. `keep` is the maximum
    number of files; the oldest is deleted. `count` is called with outcomes and numbers of records. Requests to the
    routes `probes` are never written. Requests to the routes `unrecorded` are written only if they fail.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        keep: int,
        count: Callable[[str, int], None],
        probes: Collection[str] = (),
        unrecorded: Collection[str] = (),
    ) -> None:
        self._path = path
        self._probes = frozenset(probes)
        self._unrecorded = frozenset(unrecorded)
        self._max_bytes = max_bytes
        self._keep = keep
        self._count = count
        self._waiting: deque[RequestRecord] = deque()
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False

    def __call__(self, record: RequestRecord) -> None:
        if record.route in self._probes or (record.status < 400 and record.route in self._unrecorded):
            return
        if len(self._waiting) >= MAX_QUEUED:
            self._count("dropped", 1)
            return
        self._waiting.append(record)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write_soon(), name="writing request records to a file")

    async def aclose(self) -> None:
        """Write all queued records."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        while self._waiting:
            await self._write()

    async def _write_soon(self) -> None:
        while self._waiting:
            await asyncio.sleep(GATHER_S)
            await self._write()

    async def _write(self) -> None:
        """Write the records that are in the queue now."""
        batch, self._waiting = list(self._waiting), deque()
        try:
            await asyncio.to_thread(self.append, batch)
        except OSError as error:
            if not self._is_failing:
                log.error("request records cannot be written to their file", extra={"reason": str(error)})  # noqa: TRY400
            self._is_failing = True
            self._count("failed", len(batch))
        else:
            self._is_failing = False
            self._count("kept", len(batch))

    def append(self, records: Sequence[RequestRecord]) -> None:
        """Append records, after a rotation if the file is full. Raises OSError."""
        lines = b"".join(orjson.dumps(to_facts(record)) + b"\n" for record in records)
        lock = self._open(self._path.with_name(f"{self._path.name}.lock"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            file = self._open(self._path)
            try:
                if 0 < os.fstat(file).st_size > self._max_bytes - len(lines):
                    os.close(file)
                    self._rotate()
                    file = self._open(self._path)
                _write_all(file, lines)
            finally:
                os.close(file)
        finally:
            os.close(lock)

    def _rotate(self) -> None:
        names = [self._path, *(self._path.with_name(f"{self._path.name}.{number}") for number in range(1, self._keep))]
        for older, newer in reversed(list(zip(names[1:], names, strict=False))):
            if newer.exists():
                newer.replace(older)
        if self._keep == 1:
            self._path.unlink()

    @staticmethod
    def _open(path: Path) -> int:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        os.fchmod(file, FILE_MODE)
        return file


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


class RequestLog:
    """Receiver of request records that writes each one to the log as one line, without content.

    `probes` are the routes for health checks, metrics and the files of the web page.
    """

    def __init__(self, settings: RequestLogSettings, probes: Collection[str] = ()) -> None:
        self._sample = settings.sample
        self._fields = None if settings.fields is None else frozenset(settings.fields)
        self._quiet = frozenset() if settings.probes else frozenset(probes)

    def __call__(self, record: RequestRecord) -> None:
        has_failed = record.status >= 400 or bool(record.error)
        # S311: the random number is not a secret
        if not has_failed and (record.route in self._quiet or random() >= self._sample):  # noqa: S311
            return
        facts = to_facts(record)
        if self._fields is not None:
            facts = {name: value for name, value in facts.items() if name in self._fields}
        request_log.info(log_line(record), extra={"request": facts})


def log_line(record: RequestRecord) -> str:
    """Return the record as one readable line."""
    parts = (record.method, record.route or "(unknown path)", str(record.status or ""))
    line = [" ".join([*filter(None, parts), f"in {record.duration_s:.3g} s"])]
    if record.error:
        line.append(record.error)
    if record.deployment:
        line.append(f"{record.served_model or record.model} on {record.deployment}")
    elif record.model:
        line.append(record.model)
    if record.output_tokens:
        line.append(f"{record.input_tokens} + {record.output_tokens} tokens")
    if record.first_token_s is not None:
        line.append(f"first token after {record.first_token_s:.3g} s")
    if record.key:
        line.append(f"key {record.key_name or record.key}")
    if record.recoveries:
        line.append(f"repaired: {' '.join(record.recoveries)}")
    return ", ".join(line)
