"""Disk usage and removal of a run's files, including deleted files that are still open.

The sandbox process uses this module, so it needs only the standard library. No function follows symbolic links of the
code.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Minimum size counted for a file, so that many empty files also reach the limit.
SMALLEST = 4096
# World-writable directories. Files of the run's user id in them belong to the run.
SHARED = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock")  # noqa: S108
# Size of a tree that is too deep to be measured, so it exceeds every limit.
ENDLESS = 1 << 62
# Kernel name of shared memory without a file. It counts as memory, not as disk.
SHARED_MEMORY = "/dev/zero (deleted)"
LIBC = ctypes.CDLL(None)
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def size_of(about: os.stat_result) -> int:
    return max(about.st_blocks * 512, SMALLEST)


def files(directory: str) -> Iterator[int]:
    """Yield the size of each file and directory below a directory, as far as they are readable.

    A directory whose path is too long to be opened yields `ENDLESS`.
    """
    waiting = [directory]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        about = entry.stat(follow_symlinks=False)
                        yield size_of(about)
                        if stat.S_ISDIR(about.st_mode):
                            waiting.append(entry.path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                yield ENDLESS


def shared_files(user: int | None) -> Iterator[str]:
    """Yield paths of a user's files in the world-writable directories."""
    for place in SHARED if user is not None else ():
        with suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == user:
                        yield entry.path


def remaining_bytes(room: int, directory: str, user: int | None) -> int:
    """Return `room` minus the bytes that a run's files occupy.

    As soon as the result is negative, it is returned without counting the remaining files.
    """
    places = [directory]
    for path in shared_files(user):
        with suppress(OSError):
            room -= size_of(os.lstat(path))
        places.append(path)
    for place in places:
        for size in files(place):
            room -= size
            if room < 0:
                return room
    return room


@contextmanager
def file_access_of(user: int | None) -> Iterator[None]:
    """Access files with the rights of `user` in this context, but remain root otherwise.

    In containers, root may not inspect the processes of other users; only the user itself may. Because the process id
    still belongs to root, processes of `user` cannot kill this process. If `user` is None, nothing changes.
    """
    if user is not None:
        LIBC.setfsgid(user)
        LIBC.setfsuid(user)
    try:
        yield
    finally:
        if user is not None:
            LIBC.setfsuid(0)
            LIBC.setfsgid(0)


def deleted_files(proc: int, processes: Iterator[str], user: int | None) -> dict[tuple[int, int], int]:
    """Return the sizes of deleted files that `processes` hold open, by device and inode."""
    found: dict[tuple[int, int], int] = {}
    for process in processes:
        with file_access_of(user):
            _note_deleted(found, proc, f"{process}/fd")
        # Only the machine's root may follow these links.
        _note_deleted(found, proc, f"{process}/map_files")
    return found


def _note_deleted(found: dict[tuple[int, int], int], proc: int, path: str) -> None:
    with suppress(OSError):
        folder = os.open(path, OPEN_FOLDER, dir_fd=proc)
        try:
            for name in os.listdir(folder):  # noqa: PTH208
                with suppress(OSError):
                    if os.readlink(name, dir_fd=folder) == SHARED_MEMORY:
                        continue
                    about = os.stat(name, dir_fd=folder)
                    if stat.S_ISREG(about.st_mode) and not about.st_nlink:
                        found[about.st_dev, about.st_ino] = size_of(about)
        finally:
            os.close(folder)


def delete_tree(path: str) -> None:
    """Delete a directory tree of any depth and with any permissions, as far as possible."""
    with suppress(OSError):
        os.chmod(path, 0o700)  # noqa: PTH101
        top = os.open(path, OPEN_FOLDER)
        try:
            _flatten(top)
        finally:
            os.close(top)
        os.rmdir(path)  # noqa: PTH106


def _flatten(top: int) -> None:
    # Each subdirectory is moved to the top and emptied there, so paths stay short and no recursion is needed.
    prefix = f".{secrets.token_hex(8)}-"
    moved = _empty_folder(top, top, prefix, 0)
    done = 0
    while done < moved:
        name = f"{prefix}{done}"
        done += 1
        with suppress(OSError):
            folder = os.open(name, OPEN_FOLDER, dir_fd=top)
            try:
                moved = _empty_folder(folder, top, prefix, moved)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)


def _empty_folder(folder: int, top: int, prefix: str, moved: int) -> int:
    """Delete the files in `folder`, and move its subfolders to `top`.

    `moved` is the number of folders moved before. Return this number plus the newly moved folders.
    """
    for name in os.listdir(folder):
        with suppress(OSError):
            if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.chmod(name, 0o700, dir_fd=folder)
                os.rename(name, f"{prefix}{moved}", src_dir_fd=folder, dst_dir_fd=top)
                moved += 1
            else:
                os.unlink(name, dir_fd=folder)
    return moved


def delete_shared_files(user: int | None) -> None:
    """Delete files of the run in world-writable directories.

    The next run with the same user id must not find them.
    """
    for path in list(shared_files(user)):
        if os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114
            delete_tree(path)
        else:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108
