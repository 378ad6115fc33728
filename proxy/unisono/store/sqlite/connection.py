"""Connections to the SQLite file: opening, transactions, errors, and loss of the file.

The write-ahead log is synced at every commit, so acknowledged writes survive a killed process and a power failure.
SQLite continues to use a file that was deleted or replaced. Everything that it writes there would be lost at the next
start, so `OpenedFile.check` detects this before each write.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Mapping
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
    written. Also raises `StoreUnavailable` if the file is missing or empty although its write-ahead log has content.
    Raises `StoreUnreadable` if a newer version wrote the file.
    """
    try:
        if path is not None:
            _create_if_missing(path.expanduser())
        db = _opened(path)
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
        db = _opened(path)
        db.execute("PRAGMA query_only = ON")
    except (OSError, RuntimeError, sqlite3.Error) as error:
        raise StoreUnavailable(f"the store cannot be opened: {error}") from error
    return db


def _create_if_missing(path: Path) -> None:
    """Create the file, unless it exists.

    Raises `StoreUnavailable` if the file is missing or empty, but the write-ahead log of a former file has content.
    SQLite would delete that log, and with it the last writes.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # The log is checked first: if another process is creating the file, the file gets content before its log does.
    has_log = _size(_log_of(path)) > 0
    if _size(path) > 0:
        return
    if has_log:
        raise StoreUnavailable(WITHOUT_FILE.format(path=path, log=_log_of(path)))
    path.touch(mode=0o600, exist_ok=True)


def _log_of(path: Path) -> Path:
    # SQLite puts the write-ahead log beside the target of a symbolic link.
    return Path(f"{path.resolve()}-wal")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _opened(path: Path | None) -> sqlite3.Connection:
    # With `mode=rw`, SQLite creates no file. If the file was moved in the meantime, a new file would cost its log.
    name = ":memory:" if path is None else f"{path.expanduser().absolute().as_uri()}?mode=rw"
    return sqlite3.connect(name, isolation_level=None, timeout=LOCK_TIMEOUT_S, check_same_thread=False, uri=True)


def is_unwritable(error: StoreUnavailable) -> bool:
    """Return True if `connect` failed because the path is not writable.

    Return False if it failed because of the file's content.
    """
    cause = error.__cause__
    if isinstance(cause, sqlite3.Error):
        return primary_code(cause) in UNWRITABLE
    return isinstance(cause, OSError | RuntimeError)


DAMAGED = (
    "the file of the store is damaged; stop the gateway, replace the file with a backup, remove the files of the store "
    "that end in -wal and -shm, and start the gateway"
)
# Messages for callers, by SQLite's primary codes. The error itself is the cause, for the log.
TROUBLE: Mapping[int, str] = {
    sqlite3.SQLITE_FULL: "the store is full",
    sqlite3.SQLITE_READONLY: "the store currently rejects writes",
    sqlite3.SQLITE_BUSY: (
        f"the store has been locked by other processes for at least {LOCK_TIMEOUT_S:g} s; "
        "try again, or use Redis for this load"
    ),
    sqlite3.SQLITE_CORRUPT: DAMAGED,
    sqlite3.SQLITE_NOTADB: DAMAGED,
}


def primary_code(error: BaseException | None) -> int:
    """Return the primary code of a SQLite error, or 0 for any other error."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def unavailable(error: sqlite3.Error) -> StoreUnavailable:
    """Return the error for the caller of a failed transaction."""
    return StoreUnavailable(TROUBLE.get(primary_code(error), "the store failed; nothing was changed"))


def is_damage(error: sqlite3.Error) -> bool:
    """Return True if the error shows that the content of the file is damaged."""
    return primary_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


MISSING = (
    "the file of the store was deleted or moved while the gateway was running; move it back, or stop the gateway, "
    "remove the files of the store that end in -wal and -shm, and restart the gateway to begin with a new file"
)
WITHOUT_FILE = (
    "the file of the store, {path}, is missing or empty, but its write-ahead log {log} contains writes; move the file "
    "back, or stop the gateway, remove the files of the store that end in -wal and -shm, and start the gateway to "
    "begin with a new file"
)
REPLACED = (
    "the file of the store was replaced while the gateway was running; move the former file back, or stop the gateway, "
    "remove the files of the store that end in -wal and -shm, and restart the gateway to use the new file"
)
LOG_LOST = (
    "the write-ahead log of the store was deleted or replaced while the gateway was running, and the last writes may "
    "be lost; restart the gateway, or restore a backup"
)


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """Connections to the file at `path`, whose write-ahead log is at `log`.

    `inode` and `log_inode` identify these two files.
    """

    path: Path
    log: Path
    writer: sqlite3.Connection
    reader: sqlite3.Connection
    inode: tuple[int, int] | None
    log_inode: tuple[int, int] | None

    def check(self) -> None:
        """Raise `StoreUnavailable` unless the opened file and its log are in their places.

        The check changes neither file, so operation continues as soon as the opened file is moved back.
        """
        inode = _inode(self.path)
        if inode is None:
            raise StoreUnavailable(MISSING)
        if inode != self.inode:
            raise StoreUnavailable(REPLACED)
        # SQLite removes the log if another process opens a different file at this path in the meantime.
        if _inode(self.log) != self.log_inode:
            raise StoreUnavailable(LOG_LOST)


def open_file(path: Path) -> OpenedFile:
    """Open a file for writing and for reading. Raises the same errors as `connect`."""
    writer = connect(path)
    try:
        path = path.expanduser().absolute()
        log = _log_of(path)
        return OpenedFile(path, log, writer, connect_reader(path), _inode(path), _inode(log))
    except StoreUnavailable:
        writer.close()
        raise


def _inode(path: Path) -> tuple[int, int] | None:
    """Return the device and the inode of a file, or None if the file does not exist.

    Raises `StoreUnavailable` if the file cannot be accessed.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreUnavailable(f"the file of the store cannot be accessed: {error.strerror}") from error
    return found.st_dev, found.st_ino
