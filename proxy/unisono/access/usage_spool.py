"""Usage spool: usage records on the local disk that could not be written to the store yet.

Records are synced to disk before an answer is delivered. A process writes the records of another process to the store
(replay) only if that process no longer runs. A record may be replayed twice without harm, because the store counts each
record id (`once`) only once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from typing import Final

from unisono.access.spool_segment import NEW_SUFFIX, SUFFIX, SpoolSegment, to_record
from unisono.core.quotas import AccountStore, UsageRecord
from unisono.errors import StoreError

log = logging.getLogger("unisono.access")

# Age in seconds from which a segment with the suffix `NEW_SUFFIX` is deleted. A process renames its new segment at
# once, so an older segment with this suffix is left from a crash.
STALE_S: Final = 60.0
COMPACTION_BYTES: Final = 1024 * 1024
REPLAY_BATCH: Final = 128
SCAN_INTERVAL_S: Final = 2.0


@dataclass(slots=True)
class UsageSpool:
    """Files in `folder` with usage records that could not be written to one store yet.

    Such a file is called a segment. Each process writes to a segment of its own. If `folder` is None, nothing is
    spooled.
    """

    folder: Path | None = None
    store: str = ""  # the store's address
    max_bytes: int = 64 * COMPACTION_BYTES
    _own_segment: SpoolSegment | None = None
    _adopted: list[SpoolSegment] = field(default_factory=list)
    _outstanding: dict[UsageRecord, int] = field(default_factory=dict)
    _write_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _queue: list[UsageRecord] = field(default_factory=list)
    _is_failing: bool = False
    _unreadable: set[Path] = field(default_factory=set)

    @property
    def pending(self) -> int:
        """Number of records in the segments of this process that are not in the store's ledger yet."""
        return len(self._outstanding) + sum(segment.records for segment in self._adopted)

    async def append(self, settlements: Sequence[UsageRecord]) -> bool:
        """Write the records to disk.

        Return True if all of them are on disk. Concurrent calls share one sync.
        """
        if self.folder is None:
            return False
        self._queue += settlements
        async with self._write_lock:
            if batch := self._queue:
                self._queue = []
                await self._run(partial(self._append, batch))
        return all(settlement in self._outstanding for settlement in settlements)

    def settled(self, settlements: Sequence[UsageRecord]) -> None:
        """Mark these records as written to the ledger, so that `shrink` can remove them from disk."""
        for settlement in settlements:
            self._outstanding.pop(settlement, None)

    async def shrink(self) -> None:
        """Remove settled records from this process's segment if most of its records are settled."""
        if self._own_segment is not None and self._own_segment.size:
            async with self._write_lock:
                await self._run(self._shrink)

    async def seal(self) -> None:
        """Unlock the segment of this process if it contains records.

        A later replay then reads the records from the file.
        """
        if self._outstanding:
            async with self._write_lock:
                await self._run(self._seal)

    async def release(self) -> None:
        """Unlock all segments, so that another process, or `replay` later, can lock them again."""
        async with self._write_lock:
            await self._run(self._release)

    async def replay(self, accounts: AccountStore) -> None:
        """Write the records of processes that no longer run to the store.

        The segments of these processes are locked meanwhile and then deleted. Raises StoreError, and keeps the
        segments, if the store does not accept the records.
        """
        async with self._write_lock:
            await self._run(self._adopt)
        for segment in list(self._adopted):
            records = await asyncio.to_thread(segment.read)
            for start in range(0, len(records), REPLAY_BATCH):
                await _settled(accounts, records[start : start + REPLAY_BATCH])
            if segment in self._adopted:
                self._adopted.remove(segment)
                await asyncio.to_thread(segment.delete)
                log.warning("usage records of the spool written to the ledger", extra={"count": len(records)})

    async def _run(self, work: Callable[[], None]) -> None:
        # If the caller is cancelled, wait for the thread, because it changes a segment and needs the lock.
        running = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise

    # -- in a thread, under the lock

    def _append(self, batch: Sequence[UsageRecord]) -> None:
        lines = {settlement: to_record(settlement) for settlement in batch if settlement not in self._outstanding}
        data = b"".join(lines.values())
        try:
            segment = self._own_segment = self._own_segment or self._create()
            segment.write(data, self.max_bytes)
        except OSError as error:
            if not self._is_failing:
                log.warning("usage records not spooled", extra={"cause": str(error)})
            self._is_failing = True
        else:
            self._is_failing = False
            self._outstanding.update({settlement: len(line) for settlement, line in lines.items()})

    def _shrink(self) -> None:
        segment, live = self._own_segment, sum(self._outstanding.values())
        if segment is None:
            return
        with suppress(OSError):
            if not self._outstanding:
                segment.clear()
            elif segment.size > COMPACTION_BYTES and live < segment.size // 2:
                # Delete the old segment only when the new segment is complete. A crash in between leaves both segments,
                # which is harmless because replay is idempotent.
                new = self._create()
                try:
                    new.write(b"".join(map(to_record, self._outstanding)), self.max_bytes)
                except BaseException:
                    new.delete()
                    raise
                self._own_segment = new
                segment.delete()

    def _seal(self) -> None:
        own, self._own_segment = self._own_segment, None
        if own is not None:
            if self._outstanding:
                own.close()
            else:
                own.delete()
            self._outstanding.clear()

    def _release(self) -> None:
        self._seal()
        for segment in self._adopted:
            segment.close()
        self._adopted.clear()

    def _create(self) -> SpoolSegment:
        assert self.folder is not None
        return SpoolSegment.create(self.folder, f"{self._prefix}-{os.getpid()}-{token_hex(4)}")

    def _adopt(self) -> None:
        """Lock the segments of processes that no longer run.

        Raises OSError if the folder cannot be read.
        """
        if self.folder is None:
            return
        try:
            paths = sorted(self.folder.iterdir())
        except FileNotFoundError:
            return
        known = {segment.path for segment in (*self._adopted, *([self._own_segment] if self._own_segment else ()))}
        for path in paths:
            if not path.name.startswith(f"{self._prefix}-") or path in known:
                continue
            if path.suffix == NEW_SUFFIX:
                _delete_stale(path)
            elif path.suffix == SUFFIX:
                self._adopt_segment(path)

    def _adopt_segment(self, path: Path) -> None:
        try:
            segment = SpoolSegment.open(path)
        except (BlockingIOError, FileNotFoundError):
            # Another process has locked or deleted the segment.
            return
        except OSError as error:
            if path not in self._unreadable:
                log.warning("usage spool segment unreadable", extra={"file": path.name, "cause": str(error)})
            self._unreadable.add(path)
            return
        self._unreadable.discard(path)
        self._adopted.append(segment)

    @property
    def _prefix(self) -> str:
        """Prefix of the file names: a digest of the store's address without credentials.

        It ensures that records are written only to the store for which they were spooled.
        """
        scheme, separator, rest = self.store.partition("://")
        host, slash, path = rest.partition("/")
        address = scheme.replace("valkey", "redis") + separator + host.rpartition("@")[2] + slash + path
        return f"usage-{blake2b(address.encode('utf-8', 'surrogatepass'), digest_size=6).hexdigest()}"


async def _settled(accounts: AccountStore, records: Sequence[UsageRecord]) -> None:
    try:
        await accounts.settle(*records)
    except StoreError:
        raise
    except Exception as error:
        if len(records) == 1:
            about = {"model": records[0].entry.model}
            log.exception("usage record lost: the store rejects it", exc_info=error, extra=about)
            return
        # The store rejects a record in the batch. Write them one by one to find it.
        for record in records:
            await _settled(accounts, [record])


def _delete_stale(path: Path) -> None:
    with suppress(OSError):
        if time.time() - path.stat(follow_symlinks=False).st_mtime > STALE_S:
            path.unlink()
