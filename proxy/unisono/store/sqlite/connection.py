"""Opening of the SQLite file, for the writer and for readers, and transactions on it.

The write-ahead log is synced at every commit, so acknowledged writes survive a killed process and a power failure.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from unisono.core.frozen import dataclass
from unisono.core.state_store import Retention
from unisono.errors import StoreUnavailable, StoreUnreadable
from unisono.store.codec import StateLimits
from unisono.store.sqlite.schema import create_tables

P = ParamSpec("P")
T = TypeVar("T")

# SQLite's primary codes for a path where no file can be written.
UNWRITABLE = frozenset({sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM})


@dataclass(frozen=True, slots=True)
class Transaction:
    """Open transaction. `now` is the time of the transaction in seconds since 1970."""

    db: sqlite3.Connection
    now: float
    retention: Retention
    bounds: StateLimits


class Transactions(Protocol):
    """Methods of the SQLite store that run work in a transaction, for the store's parts."""

    _is_in_memory: bool

    def _run(self, work: Callable[Concatenate[Transaction, P], T], *args: P.args, **named: P.kwargs) -> Awaitable[T]:
        """Run work that writes."""
        ...

    def _read(self, work: Callable[Concatenate[Transaction, P], T], *args: P.args, **named: P.kwargs) -> Awaitable[T]:
        """Run work that only reads."""
        ...


# Maximum time in seconds for which an operation waits while another process writes to the file.
LOCK_TIMEOUT_S = 5.0


def connect(path: Path | None) -> sqlite3.Connection:
    """Open the file, or a database in memory if `path` is None.

    A missing file is created, with access for its owner only. Raises `StoreUnavailable` if the file cannot be opened or
    written, `StoreUnreadable` if a newer version wrote it.
    """
    try:
        if path is not None:
            path = path.expanduser()
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600, exist_ok=True)
        db = _opened(":memory:" if path is None else path)
    except (OSError, RuntimeError, sqlite3.Error) as error:
        # A RuntimeError means that there is no home directory for ~.
        raise StoreUnavailable(f"the store cannot be opened: {error}") from error
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        # On macOS an ordinary sync leaves data in the drive's own cache. Elsewhere this has no effect.
        db.execute("PRAGMA fullfsync = ON")
        create_tables(db)
    except sqlite3.Error as error:
        db.close()
        raise StoreUnavailable(f"the store cannot be opened: {error}") from error
    except StoreUnreadable:
        db.close()
        raise
    return db


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open for reading a file that `connect` has opened before.

    Raises `StoreUnavailable` if this fails.
    """
    try:
        db = _opened(path.expanduser())
        db.execute("PRAGMA query_only = ON")
    except (OSError, RuntimeError, sqlite3.Error) as error:
        raise StoreUnavailable(f"the store cannot be opened: {error}") from error
    return db


def _opened(path: Path | str) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None, timeout=LOCK_TIMEOUT_S, check_same_thread=False)


def is_unwritable(error: StoreUnavailable) -> bool:
    """Return True if `connect` failed because the path is not writable.

    Return False if it failed because of the file's content.
    """
    cause = error.__cause__
    if isinstance(cause, sqlite3.Error):
        return (getattr(cause, "sqlite_errorcode", 0) & 0xFF) in UNWRITABLE
    return isinstance(cause, OSError | RuntimeError)
