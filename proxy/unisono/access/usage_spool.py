"""Usage spool: usage records on local disk that the store has not accepted yet.

A segment is an append-only file with one JSON record per line, synced before an answer is delivered. Its owner holds a
file lock, so a process replays only segments without a living owner. Replay is idempotent by the record's `once`.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

from unisono.core.access import NO_LIMITS
from unisono.core.quotas import USED, Account, AccountStore, LedgerLine, QuotaReservation, TokenUsage, UsageRecord
from unisono.errors import StoreError

log = logging.getLogger("unisono.access")

RECORD_VERSION: Final = 1
SUFFIX: Final = ".jsonl"
# Suffix of a segment before its first record; its process may die before renaming it.
NEW_SUFFIX: Final = ".new"
# Age from which an unnamed segment cannot be in use by a starting process, in seconds.
STALE_S: Final = 60.0
COMPACTION_BYTES: Final = 1024 * 1024
REPLAY_BATCH: Final = 128
SCAN_INTERVAL_S: Final = 2.0


def to_record(settlement: UsageRecord) -> bytes:
    """Encode a usage record as a line of a segment; `from_record` decodes it."""
    entry, claim = settlement.entry, settlement.claim
    record: dict[str, Any] = {
        "v": RECORD_VERSION,
        "once": settlement.once,
        "tenant": entry.account.tenant,
        "key": entry.account.key,
        "model": entry.model,
        "day": entry.day,
        "served": entry.served,
        "used": {name: amount for name in USED if (amount := getattr(entry.used, name))},
    }
    if claim is not None:
        record["claim"] = {"once": claim.once, "period": claim.period, "period_ends": claim.period_ends}
    # Escapes everything outside of ASCII, so that lone surrogates in a tenant's name survive.
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def from_record(line: bytes) -> UsageRecord:
    """Parse a line. Raises ValueError for a damaged one."""
    try:
        return _parsed(line)
    # Damage can be anything: nesting without end, numbers without bound, fields of any type.
    except Exception as error:
        raise ValueError("damaged line in the usage spool") from error


def _parsed(line: bytes) -> UsageRecord:
    record = json.loads(line)
    if record["v"] != RECORD_VERSION:
        raise ValueError(f"unknown record version {record['v']!r}")
    account = Account(str(record["tenant"]), str(record["key"]))
    used = TokenUsage(**{name: int(amount) for name, amount in record["used"].items()})
    claim = None
    if (claim_values := record.get("claim")) is not None:
        # A settlement reads nothing else of its claim.
        claim = QuotaReservation(
            account,
            claim_values["once"],
            NO_LIMITS,
            0,
            0,
            0,
            0.0,
            period=claim_values["period"],
            period_ends=claim_values["period_ends"],
        )
    entry = LedgerLine(account, str(record["model"]), str(record["day"]), used, str(record.get("served", "")))
    return UsageRecord(str(record["once"]), entry, claim)


@dataclass(slots=True)
class _Segment:
    """Locked file of records; closing it releases the lock."""

    path: Path
    descriptor: int
    size: int = 0
    records: int = 0

    def write(self, data: bytes, max_bytes: int) -> None:
        """Append and sync. Raises OSError after removing a partial write."""
        if self.size + len(data) > max_bytes:
            raise OSError("the usage spool has reached `store.spool_max_bytes`")
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self.descriptor, view) :]
            os.fsync(self.descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self.descriptor, self.size)
            raise
        self.size += len(data)

    def clear(self) -> None:
        os.ftruncate(self.descriptor, 0)
        self.size = 0

    def read(self) -> Iterator[UsageRecord]:
        # The path may name another file by now.
        with open(self.descriptor, "rb", closefd=False) as lines:
            lines.seek(0)
            for line in lines:
                try:
                    settlement = from_record(line)
                except ValueError:
                    # A process that dies while it writes leaves a truncated last line.
                    log.warning("damaged line in the usage spool skipped", extra={"file": self.path.name})
                else:
                    yield settlement

    def close(self) -> None:
        os.close(self.descriptor)


@dataclass(slots=True)
class UsageSpool:
    """Segments of one store in `folder`; without a folder nothing is spooled."""

    folder: Path | None = None
    store: str = ""  # the store's address
    max_bytes: int = 64 * COMPACTION_BYTES
    _own_segment: _Segment | None = None
    _adopted: list[_Segment] = field(default_factory=list)
    _outstanding: dict[UsageRecord, int] = field(default_factory=dict)
    _write_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _queue: list[UsageRecord] = field(default_factory=list)
    _is_failing: bool = False
    _unreadable: set[Path] = field(default_factory=set)

    @property
    def pending(self) -> int:
        """Records that the ledger lacks so far, among those this process is responsible for."""
        return len(self._outstanding) + sum(segment.records for segment in self._adopted)

    async def append(self, settlements: Sequence[UsageRecord]) -> bool:
        """Return True if the records are on disk; concurrent calls share one sync."""
        if self.folder is None:
            return False
        self._queue += settlements
        async with self._write_lock:
            if batch := self._queue:
                self._queue = []
                await self._run(partial(self._append, batch))
        return all(settlement in self._outstanding for settlement in settlements)

    def settled(self, settlements: Sequence[UsageRecord]) -> None:
        """Note that the ledger has these records; `shrink` can then remove them from disk."""
        for settlement in settlements:
            self._outstanding.pop(settlement, None)

    async def shrink(self) -> None:
        """Remove settled records from this process's segment, if all or most of it are settled."""
        if self._own_segment is not None and self._own_segment.size:
            async with self._write_lock:
                await self._run(self._shrink)

    async def seal(self) -> None:
        """Unlock this process's segment if it holds records; they are replayed from the file."""
        if self._outstanding:
            async with self._write_lock:
                await self._run(self._seal)

    async def release(self) -> None:
        """Unlock all segments, so that another process or a later replay can adopt them."""
        async with self._write_lock:
            await self._run(self._release)

    async def replay(self, accounts: AccountStore) -> None:
        """Adopt segments without an owner, enter their records in the ledger and delete them.

        Raises the `StoreError` family if the ledger does not accept a record; its segment then remains.
        """
        async with self._write_lock:
            await self._run(self._adopt)
        for segment in list(self._adopted):
            records = await asyncio.to_thread(_read, segment)
            for start in range(0, len(records), REPLAY_BATCH):
                await _settled(accounts, records[start : start + REPLAY_BATCH])
            if segment in self._adopted:
                self._adopted.remove(segment)
                await asyncio.to_thread(_delete, segment)
                log.warning("usage records of the spool written to the ledger", extra={"count": len(records)})

    async def _run(self, work: Callable[[], None]) -> None:
        # A cancelled caller must not leave a thread that changes a segment without the lock.
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
                # The new segment is complete before the old one is deleted: a crash leaves both, and replay is
                # idempotent.
                new = self._create()
                try:
                    new.write(b"".join(map(to_record, self._outstanding)), self.max_bytes)
                except BaseException:
                    _delete(new)
                    raise
                self._own_segment = new
                _delete(segment)

    def _seal(self) -> None:
        own, self._own_segment = self._own_segment, None
        if own is not None:
            if self._outstanding:
                own.close()
            else:
                _delete(own)
            self._outstanding.clear()

    def _release(self) -> None:
        self._seal()
        for segment in self._adopted:
            segment.close()
        self._adopted.clear()

    def _create(self) -> _Segment:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self.folder / f"{self._prefix}-{os.getpid()}-{token_hex(4)}{SUFFIX}"
        new = path.with_suffix(NEW_SUFFIX)
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            # Locked before it has the name that others look for.
            _lock(descriptor)
            new.rename(path)
            _sync_folder(self.folder)
        except BaseException:
            for name in (new, path):
                with suppress(OSError):
                    name.unlink()
            os.close(descriptor)
            raise
        return _Segment(path, descriptor)

    def _adopt(self) -> None:
        """Lock the segments without an owner. Raises OSError if the folder cannot be read."""
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
            segment = _open_segment(path)
        except (BlockingIOError, FileNotFoundError):
            # Another process has it, or has deleted it.
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
        """File name prefix: a digest of the store's address without credentials.

        It prevents records from reaching another store.
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
        # The store rejects one of them; writing them one by one finds it.
        for record in records:
            await _settled(accounts, [record])


def _read(segment: _Segment) -> list[UsageRecord]:
    return list(segment.read())


def _delete(segment: _Segment) -> None:
    with suppress(OSError):
        segment.path.unlink()
    segment.close()


def _delete_stale(path: Path) -> None:
    with suppress(OSError):
        if time.time() - path.stat(follow_symlinks=False).st_mtime > STALE_S:
            path.unlink()


def _open_segment(path: Path) -> _Segment:
    """Lock a segment and count its records.

    Raises OSError if another process holds the lock or the file cannot be read.
    """
    descriptor = _open_file(path)
    try:
        _lock(descriptor)
        segment = _Segment(path, descriptor)
        segment.records = sum(1 for _ in segment.read())
    except BaseException:
        os.close(descriptor)
        raise
    return segment


def _open_file(path: Path) -> int:
    """Open a regular file. Raises OSError for anything else, without waiting or following links."""
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor


def _lock(descriptor: int) -> None:
    """Lock a file. Raises OSError if another process holds the lock or has deleted the file."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.fstat(descriptor).st_nlink:
        raise FileNotFoundError("the segment was deleted")


def _sync_folder(folder: Path) -> None:
    """Sync a folder; a new file's name is durable only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
