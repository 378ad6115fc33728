"""Opened SQLite file, and detection of its deletion or replacement.

SQLite continues to use a file that was deleted or replaced. Everything that it writes there would be lost at the next
start.
"""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from unisono.core.frozen import dataclass
from unisono.errors import StoreUnavailable
from unisono.store.sqlite.connection import connect, connect_reader
from unisono.store.sqlite.disk_space import TRIAL

MISSING = (
    "the file of the store was deleted or moved while the gateway was running; move it back, or restart the gateway "
    "to begin with a new file"
)
FOREIGN = (
    "the file of the store was replaced by a file that does not contain this store; move the former file or a backup "
    "back, or restart the gateway to use the new file"
)
SECRETS = "SELECT name, value FROM secrets WHERE name <> ?"

log = logging.getLogger("unisono.store")


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """Connections to the file at `path`.

    `inode` and `wal_inode` identify the file and its write-ahead log. Each is None if the file did not exist directly
    after the connections were opened.
    """

    path: Path
    writer: sqlite3.Connection
    reader: sqlite3.Connection
    inode: tuple[int, int] | None
    wal_inode: tuple[int, int] | None

    @property
    def is_replaced(self) -> bool:
        """True if `path` now names a different file than the opened one.

        Raises `StoreUnavailable` if `path` does not exist or cannot be accessed.
        """
        inode = _inode(self.path)
        if inode is None:
            raise StoreUnavailable(MISSING)
        return inode != self.inode

    def close_writer(self) -> None:
        """Close the writer. If the file was replaced, remove its write-ahead log."""
        with suppress(StoreUnavailable):
            if self.is_replaced:
                self._remove_log()
        self.writer.close()

    def reopened(self) -> OpenedFile:
        """Open the file that has replaced this one, and close the writer.

        Raises `StoreUnavailable` if the new file contains another store. This file then remains open.
        """
        self._remove_log()
        try:
            secrets = self.writer.execute(SECRETS, (TRIAL,)).fetchall()
            with closing(sqlite3.connect(f"{self.path.as_uri()}?mode=ro", uri=True)) as db:
                found = db.execute(SECRETS, (TRIAL,)).fetchall()
        except sqlite3.Error as error:
            raise StoreUnavailable(FOREIGN) from error
        # The keys in the file are useless without the salt that this process uses.
        if not set(secrets) <= set(found):
            raise StoreUnavailable(FOREIGN)
        opened = open_file(self.path)
        self.writer.close()
        log.warning("the file of the store was replaced; the gateway has opened the new file")
        return opened

    def _remove_log(self) -> None:
        """Remove the write-ahead log of a file that was replaced.

        SQLite would apply this log to the new file.
        """
        # If the former file still exists under another name, this moves its last writes from the log into the file.
        with suppress(sqlite3.Error):
            self.writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        if self.wal_inode is not None and _inode(_wal(self.path)) == self.wal_inode:
            for suffix in ("-wal", "-shm"):
                with suppress(OSError):
                    Path(f"{self.path}{suffix}").unlink()


def open_file(path: Path) -> OpenedFile:
    """Open a file for writing and for reading. Raises the same errors as `connect`."""
    writer = connect(path)
    try:
        path = path.expanduser().absolute()
        return OpenedFile(path, writer, connect_reader(path), _inode(path), _inode(_wal(path)))
    except StoreUnavailable:
        writer.close()
        raise


def _wal(path: Path) -> Path:
    return Path(f"{path}-wal")


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
