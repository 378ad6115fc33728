"""The first process of a run: starts the code within its limits, waits for it, and ends everything it left behind.

Runs as a script with the standard library alone: `cage.py STATUS SETTINGS`, where STATUS is the number of an open file
and SETTINGS is JSON with `argv`, `directory`, `environment`, `limits` (resource name to number), `user` (a number, or
null to stay), `seconds` and `disk` (bytes). At the end one line of JSON goes to STATUS: `exit` or `signal`, and whether
it was ended because its time was up, or because there was too much on the disk.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

SET_PARENT_DEATH_SIGNAL = 1
SET_CHILD_SUBREAPER = 36
SET_NO_NEW_PRIVILEGES = 38
PAUSE_S = 0.005
ENDING_S = 2.0
CANNOT_START = 127
LOOK_S = 0.1
"""Between two looks at what is on the disk; longer where looking takes long."""
SMALLEST = 4096
"""What a file counts at least: so many of them are full, too."""
SHARED = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108
"""Where everybody may write. What a user of a run's own has there is the run's."""


def prctl(option: int, value: int) -> None:
    """Tell the Linux kernel something about this process; elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def become(user: int | None) -> None:
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def limit(limits: dict[str, int]) -> None:
    for name, most in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is None:
            continue
        _, hard = resource.getrlimit(kind)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        # macOS knows a limit for memory and takes none.
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (bound, bound))


def start(settings: dict[str, Any]) -> int:
    """Fork, and run the code in the child. Returns the child's number."""
    child = os.fork()
    if child:
        return child
    try:
        os.umask(0o077)
        # Counted for the user the code runs as, so set first: whoever is over it cannot start anything.
        limit(settings["limits"])
        become(settings["user"])
        os.chdir(settings["directory"])
        prctl(SET_NO_NEW_PRIVILEGES, 1)
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execve(settings["argv"][0], settings["argv"], settings["environment"])  # noqa: S606
    except OSError as error:
        os.write(2, f"the code cannot be started: {error}\n".encode())
    os._exit(CANNOT_START)


def children(process: int) -> list[int]:
    """Its children, those of its children that lost their own parents included."""
    with suppress(OSError), open(f"/proc/{process}/task/{process}/children") as file:  # noqa: PTH123
        return [int(number) for number in file.read().split()]
    return []


def files(directory: str) -> Iterator[os.stat_result]:
    """Everything below a directory, however deep, as far as it can be read."""
    waiting = [directory]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    about = entry.stat(follow_symlinks=False)
                    yield about
                    if stat.S_ISDIR(about.st_mode):
                        waiting.append(entry.path)


def left_in_shared(user: int | None) -> Iterator[str]:
    """What a user has in the places where everybody may write."""
    for place in SHARED if user is not None else ():
        with suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == user:
                        yield entry.path


def is_full(settings: dict[str, Any]) -> bool:
    """Whether there is more on the disk than a run may have there."""
    room = settings["disk"]
    places = [settings["directory"]]
    for path in left_in_shared(settings["user"]):
        with suppress(OSError):
            room -= max(os.lstat(path).st_blocks * 512, SMALLEST)
        places.append(path)
    for place in places:
        for about in files(place):
            room -= max(about.st_blocks * 512, SMALLEST)
            if room < 0:
                return True
    return bool(room < 0)


def sweep(user: int | None) -> None:
    """Delete what the run left where everybody may write: the next one of that number must not find it."""
    for path in list(left_in_shared(user)):
        if os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108


def wait(child: int, settings: dict[str, Any]) -> dict[str, Any]:
    """How the child ended; it is ended when its time is up, or its room on the disk. Reaps whatever else ends
    meanwhile."""
    deadline = time.monotonic() + settings["seconds"]
    timed_out = full = False
    look_at = 0.0
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return {"exit": CANNOT_START, "timed_out": timed_out, "full": full}
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            how = {"signal": -code} if code < 0 else {"exit": code}
            return {**how, "timed_out": timed_out, "full": full}
        if ended:
            continue
        if not timed_out and time.monotonic() >= deadline:
            timed_out = True
            os.kill(child, signal.SIGKILL)
        if not (timed_out or full) and time.monotonic() >= look_at:
            begun = time.monotonic()
            if is_full(settings):
                full = True
                os.kill(child, signal.SIGKILL)
            look_at = time.monotonic() + max(LOOK_S, 4 * (time.monotonic() - begun))
        time.sleep(PAUSE_S)


def end_all_of(user: int) -> None:
    """End every process of a user, at one moment: none gets away by starting another. Nobody else is that user."""
    child = os.fork()
    if not child:
        with suppress(OSError):
            become(user)
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    with suppress(ChildProcessError):
        os.waitpid(child, 0)


def clear(user: int | None) -> None:
    """End what is left, wherever it went. Bounded in time: what starts others faster than they are found is left to
    the limits, and to whoever ends the process group."""
    until = time.monotonic() + ENDING_S
    while time.monotonic() < until:
        if user is not None:
            end_all_of(user)
        left = children(os.getpid())
        if not left:
            return
        for process in left:
            left += children(process)
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        time.sleep(PAUSE_S)


def main() -> None:
    status, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    os.set_inheritable(status, False)
    prctl(SET_CHILD_SUBREAPER, 1)
    prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    outcome = wait(start(settings), settings)
    os.write(status, json.dumps(outcome).encode())
    # Whoever is left could write still.
    clear(settings["user"])
    sweep(settings["user"])
    # The first process of a process space takes all others with it when it ends.
    if os.getpid() != 1 and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
