"""Opened SQLite file, and detection of its deletion or replacement.

SQLite continues to use a file that was deleted or replaced. Everything that it writes there would be lost at the next
start.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from unisono.core.frozen import dataclass
from unisono.errors import StoreUnavailable
from unisono.store.sqlite.connection import connect, connect_reader

MISSING = (
    "the file of the store was deleted or moved while the gateway was running; move it back, or restart the gateway "
    "to begin with a new file"
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
        # SQLite puts the log beside the target of a symbolic link.
        log = Path(f"{path.resolve()}-wal")
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
