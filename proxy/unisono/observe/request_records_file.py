"""Request records as JSON lines in rotated files, which several processes may share.

Records wait briefly in a queue, and a thread appends them in batches. For each batch, the thread locks a separate file
in the same folder. Therefore no process appends to a file that another process is rotating.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import orjson

from unisono.core.request_record import RequestRecord, to_facts

log = logging.getLogger("unisono.observe")

MAX_QUEUED: Final = 20_000
# Time that the first record of a batch waits for others, in seconds.
GATHER_S: Final = 0.25
# Only the gateway's own user may read the records.
MODE: Final = 0o600


class RequestFile:
    """Receiver of records that appends them to the file `path`.

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
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)
        os.fchmod(file, MODE)
        return file


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
