"""Segment of the usage spool: an append-only file with one JSON record per line.

The process that writes to a segment holds a lock on the file. So does a process that replays the segment.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from unisono.core.quotas import NO_LIMITS, USED, Account, LedgerLine, QuotaReservation, TokenUsage, UsageRecord

log = logging.getLogger("unisono.access")

RECORD_VERSION: Final = 1
SUFFIX: Final = ".jsonl"
# Suffix of a segment that was just created and is not locked yet. If its process crashes then, the file keeps it.
NEW_SUFFIX: Final = ".new"


def to_record(record: UsageRecord) -> bytes:
    """Encode a usage record as a line of a segment, which `from_record` decodes."""
    entry, claim = record.entry, record.claim
    fields: dict[str, Any] = {
        "v": RECORD_VERSION,
        "once": record.once,
        "tenant": entry.account.tenant,
        "key": entry.account.key,
        "model": entry.model,
        "day": entry.day,
        "served": entry.served,
        "used": {name: amount for name in USED if (amount := getattr(entry.used, name))},
    }
    if claim is not None:
        fields["claim"] = {"once": claim.once, "period": claim.period, "period_ends": claim.period_ends}
    # `json` escapes all characters outside ASCII, so that lone surrogates in the name of a tenant are preserved.
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def from_record(line: bytes) -> UsageRecord:
    """Parse a line of a segment. Raises ValueError if the line is damaged."""
    try:
        return _parsed(line)
    # A damaged line can contain anything, such as deep nesting, huge numbers, or fields of the wrong type.
    except Exception as error:
        raise ValueError("damaged line in the usage spool") from error


def _parsed(line: bytes) -> UsageRecord:
    record = json.loads(line)
    if record["v"] != RECORD_VERSION:
        raise ValueError(f"unknown record version {record['v']!r}")
    account = Account(str(record["tenant"]), str(record["key"]))
    used = TokenUsage(**{name: int(amount) for name, amount in record["used"].items()})
    entry = LedgerLine(account, str(record["model"]), str(record["day"]), used, str(record.get("served", "")))
    claim = None
    if (claimed := record.get("claim")) is not None:
        # Settling a record needs only these fields of its reservation.
        once, period, ends = claimed["once"], claimed["period"], claimed["period_ends"]
        claim = QuotaReservation(account, once, NO_LIMITS, 0, 0, 0, 0.0, period=period, period_ends=ends)
    return UsageRecord(str(record["once"]), entry, claim)


@dataclass(slots=True)
class SpoolSegment:
    """Locked file of records. Closing it releases the lock."""

    path: Path
    descriptor: int
    size: int = 0
    records: int = 0

    @classmethod
    def create(cls, folder: Path, name: str) -> Self:
        """Create a locked segment in `folder`, and the folder itself if it does not exist.

        Raises OSError if the folder or the file cannot be created.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"{name}{SUFFIX}"
        new = path.with_suffix(NEW_SUFFIX)
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            # Lock the file before it gets the name for which other processes look.
            _lock(descriptor)
            new.rename(path)
            _sync_folder(folder)
        except BaseException:
            for each in (new, path):
                with suppress(OSError):
                    each.unlink()
            os.close(descriptor)
            raise
        return cls(path, descriptor)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Lock a segment and count its records.

        Raises OSError if the file cannot be opened or another process has the lock.
        """
        descriptor = _open_file(path)
        try:
            _lock(descriptor)
            segment = cls(path, descriptor)
            segment.records = len(segment.read())
        except BaseException:
            os.close(descriptor)
            raise
        return segment

    def write(self, data: bytes, max_bytes: int) -> None:
        """Append `data` and sync it to disk.

        Raises OSError if the segment would exceed `max_bytes`, or if the data cannot be written. Partially written data
        is removed.
        """
        if self.size + len(data) > max_bytes:
            raise OSError("the usage spool would exceed `store.spool_max_bytes`")
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

    def read(self) -> list[UsageRecord]:
        """Return all records that are not damaged; log a warning for each damaged record."""
        records = []
        # Read from the descriptor, because the path may be that of a different file by now.
        with open(self.descriptor, "rb", closefd=False) as lines:
            lines.seek(0)
            for line in lines:
                try:
                    records.append(from_record(line))
                except ValueError:
                    # A process that crashes while it writes leaves a truncated last line.
                    log.warning("damaged line in the usage spool skipped", extra={"file": self.path.name})
        return records

    def close(self) -> None:
        os.close(self.descriptor)

    def delete(self) -> None:
        with suppress(OSError):
            self.path.unlink()
        self.close()


def _open_file(path: Path) -> int:
    """Open a regular file, without blocking and without following links.

    Raises OSError for any other file.
    """
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
    """Sync a folder to disk, which makes the name of a new file durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
