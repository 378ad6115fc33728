"""Conversion of SQLite's errors to errors of the store."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from unisono.errors import StoreUnavailable
from unisono.store.sqlite.connection import LOCK_TIMEOUT_S

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
