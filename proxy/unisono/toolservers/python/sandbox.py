"""First process of a run: sets up the sandbox, starts the code, ends all processes.

Runs as a script with `run_files` and the standard library alone: `sandbox.py STATUS SETTINGS`. STATUS is the number of
an open file descriptor. SETTINGS is JSON with `argv`, `directory`, `environment`, `limits` (resource name to number),
`user` (a user id, or null for no change), `seconds`, `disk` and `memory` (bytes for the whole run), `filter` (a seccomp
program in base64, or empty), and `root`: null, or the directory that becomes the root of a new file system that
contains only `paths`. At the end, one line of JSON is written to STATUS: `exit` or `signal`, and the limit that ended
the run.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

if __name__ == "__main__":
    # An isolated interpreter finds only the standard library.
    sys.path.append(os.path.abspath(f"{__file__}/../../../.."))  # noqa: PTH100

from unisono.toolservers.python.run_files import SMALLEST, delete_shared_files, deleted_files, remaining_bytes

SET_PARENT_DEATH_SIGNAL = 1
SET_DUMPABLE = 4
SET_SECCOMP = 22
DROP_FROM_BOUNDING_SET = 24
SET_CHILD_SUBREAPER = 36
SET_NO_NEW_PRIVILEGES = 38
AMBIENT_CAPABILITIES = 47

SECCOMP_MODE_FILTER = 2
CLEAR_ALL = 4
MAX_CAPABILITIES = 64

# mount(2), umount2(2) and mount_setattr(2); the last has one number on all architectures and no wrapper in glibc 2.35.
MOUNT_SETATTR = 442
AT_RECURSIVE = 0x8000
MNT_DETACH = 2
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC = 1, 2, 4, 8, 4096, 16384
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4

DEVICES = ("null", "zero", "full", "random", "urandom")
DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
WRITABLE = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108
MAX_LINKS = 40
PAUSE_S = 0.005
ENDING_S = 2.0
CANNOT_START = 127
# Minimum interval between checks of disk and memory, in seconds. It increases if the checks are slow.
LOOK_S = 0.1

LIBC = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, *values: int) -> bool:
    """Set an attribute of this process. Does nothing on systems other than Linux."""
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    return sys.platform == "linux" and bool(LIBC.prctl(option, *padded) == 0)


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0 for success. Raises OSError."""
    if getattr(LIBC, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = [text.encode() for text in (source, target, kind)]
    call("mount", *texts, ctypes.c_ulong(flags), options.encode() or None)


def bind(path: str, target: str, attributes: int) -> None:
    """Mount `path` at `target`, including all mounts below it, with stricter attributes."""
    mount(path, target, "", MS_BIND | MS_REC)
    settings = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    call("syscall", MOUNT_SETATTR, -100, target.encode(), AT_RECURSIVE, ctypes.byref(settings), ctypes.c_size_t(32))


def expose(root: str, path: str) -> None:
    """Mount `path` below `root`, read-only, at the same path.

    The symbolic links in `path` are created below `root` too.
    """
    done, parts, links = "/", deque(path.split("/")), 0
    while parts:
        part = parts.popleft()
        here = os.path.normpath(f"{done}/{part}")
        if not os.path.islink(here):  # noqa: PTH114
            done = here
            continue
        links += 1
        target = os.readlink(here)  # noqa: PTH115
        if not os.path.lexists(root + here):
            os.makedirs(os.path.dirname(root + here), exist_ok=True)  # noqa: PTH103, PTH120
            os.symlink(target, root + here)  # noqa: PTH211
        done = "/" if target.startswith("/") else done
        parts.extendleft(reversed(target.split("/")))
        if links > MAX_LINKS:
            return
    if not os.path.exists(done):  # noqa: PTH110
        return
    target = root + done
    # If the target is on a different device than the root, an earlier mount already exposes it.
    if os.path.exists(target) and os.stat(target).st_dev != os.stat(root).st_dev:  # noqa: PTH110, PTH116
        return
    if os.path.isdir(done):  # noqa: PTH112
        os.makedirs(target, exist_ok=True)  # noqa: PTH103
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    bind(done, target, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)


def enter_new_root(settings: dict[str, Any]) -> None:
    """Replace the root with an empty file system in memory.

    Its size is limited by `disk`. The exposed paths are mounted in it, read-only.
    """
    root: str = settings["root"]
    size = settings["disk"]
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},nr_inodes={size // SMALLEST},mode=755")
    for path in settings["paths"]:
        expose(root, path)
    os.makedirs(f"{root}/dev")  # noqa: PTH103
    for name in DEVICES:
        os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o644))
        bind(f"/dev/{name}", f"{root}/dev/{name}", ATTR_RDONLY | ATTR_NOSUID)
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, f"{root}/dev/{name}")  # noqa: PTH211
    for place in WRITABLE:
        os.makedirs(root + place, exist_ok=True)  # noqa: PTH103
        os.chmod(root + place, 0o1777)  # noqa: PTH101, S103
    os.makedirs(f"{root}/proc")  # noqa: PTH103
    # A container may refuse a new /proc, which then stays empty. It is read-only, because /proc/sys changes the
    # machine.
    with suppress(OSError):
        mount("proc", f"{root}/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.makedirs(root + settings["directory"])  # noqa: PTH103
    if settings["user"] is not None:
        os.chown(root + settings["directory"], settings["user"], settings["user"])
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def drop_capabilities() -> None:
    """Drop capabilities of the user namespace, and those that a setuid program could regain."""
    prctl(AMBIENT_CAPABILITIES, CLEAR_ALL)
    for capability in range(MAX_CAPABILITIES):
        prctl(DROP_FROM_BOUNDING_SET, capability)


def load_filter(program: str) -> None:
    """Load a compiled seccomp filter into this process. Raises OSError."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    code = base64.b64decode(program)
    loaded = Program(len(code) // 8, code)
    if not prctl(SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(loaded)):
        raise OSError(ctypes.get_errno(), "the system call filter could not be loaded")


def switch_user(user: int | None) -> None:
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
        # macOS defines a memory limit but rejects every value for it.
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (bound, bound))


def start(settings: dict[str, Any]) -> int:
    """Fork and run the code in the child. Return the child's process id."""
    child = os.fork()
    if child:
        return child
    try:
        os.umask(0o077)
        # Some limits count all processes of a user id, so they are set before the code starts.
        limit(settings["limits"])
        drop_capabilities()
        switch_user(settings["user"])
        os.chdir(settings["directory"])
        prctl(SET_NO_NEW_PRIVILEGES, 1)
        prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if settings["filter"]:
            load_filter(settings["filter"])
        os.execve(settings["argv"][0], settings["argv"], settings["environment"])  # noqa: S606
    except OSError as error:
        os.write(2, f"the code could not be started: {error}\n".encode())
    os._exit(CANNOT_START)


def read(proc: int, path: str) -> str:
    """Read the file at `path` below /proc. Return an empty string if the file is missing.

    `proc` is a file descriptor of the directory /proc.
    """
    with suppress(OSError), open(os.open(path, os.O_RDONLY, dir_fd=proc)) as file:  # noqa: PTH123
        return file.read()
    return ""


def descendants(proc: int) -> Iterator[str]:
    """Yield the ids of all descendants of this process.

    `proc` is a file descriptor of the directory /proc. Orphans are included, because they become children of this
    process.
    """
    waiting = [os.readlink("self", dir_fd=proc)]
    while waiting:
        for thread in threads(proc, waiting.pop()):
            found = read(proc, f"{thread}/children").split()
            waiting += found
            yield from found


def threads(proc: int, process: str) -> list[str]:
    """Return the paths of a process's threads in `proc`."""
    with suppress(OSError):
        folder = os.open(f"{process}/task", os.O_RDONLY, dir_fd=proc)
        try:
            return [f"{process}/task/{thread}" for thread in os.listdir(folder)]  # noqa: PTH208
        finally:
            os.close(folder)
    return []


def resident(proc: int, process: str) -> int:
    """Return the resident bytes of a process, including shared pages."""
    return int((read(proc, f"{process}/statm").split() or (0, 0))[1]) * resource.getpagesize()


def proportional(proc: int, process: str) -> int:
    """Return the proportional set size of a process in bytes, or its resident bytes if unknown.

    Each shared page is divided by the number of processes that share it.
    """
    for line in read(proc, f"{process}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return resident(proc, process)


def exceeds_memory(proc: int, most: int) -> bool:
    """Return True if the processes of the run use more than `most` bytes in total.

    The exact value is computed only if a cheap upper estimate exceeds `most`.
    """
    processes = list(descendants(proc))
    if sum(resident(proc, process) for process in processes) <= most:
        return False
    return sum(proportional(proc, process) for process in processes) > most


def is_full(proc: int | None, settings: dict[str, Any]) -> bool:
    """Return True if the files of the run exceed `disk`. Deleted open files count too."""
    if settings["root"] is not None:
        space = os.statvfs(settings["directory"])
        return space.f_bavail == 0 or space.f_favail == 0
    user = settings["user"]
    room = remaining_bytes(settings["disk"], settings["directory"], user)
    if room >= 0 and proc is not None:
        room -= sum(deleted_files(proc, descendants(proc), user).values())
    return room < 0


def exceeded(proc: int | None, settings: dict[str, Any]) -> str:
    """Return the exceeded limit of the run, "memory" or "disk", or an empty string."""
    if proc is not None and exceeds_memory(proc, settings["memory"]):
        return "memory"
    return "disk" if is_full(proc, settings) else ""


def wait(child: int, proc: int | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Wait for the child and return its outcome.

    Kill it at a limit of the run, and reap orphans.
    """
    deadline = time.monotonic() + settings["seconds"]
    ended_by, look_at = "", 0.0
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return {"exit": CANNOT_START, "limit": ended_by}
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            if code and not ended_by:
                # With a file system in memory, a write may have failed before the next check.
                ended_by = exceeded(None, settings)
            return {**({"signal": -code} if code < 0 else {"exit": code}), "limit": ended_by}
        if ended:
            continue
        if not ended_by and time.monotonic() >= look_at:
            started_at = time.monotonic()
            ended_by = "time" if started_at >= deadline else exceeded(proc, settings)
            if ended_by:
                os.kill(child, signal.SIGKILL)
            look_at = min(deadline, time.monotonic() + max(LOOK_S, 4 * (time.monotonic() - started_at)))
        time.sleep(PAUSE_S)


def end_all_of(user: int) -> None:
    """Kill all processes of a user at once, so that no process can escape by forking.

    No process outside this run has this user id.
    """
    child = os.fork()
    if not child:
        with suppress(OSError):
            switch_user(user)
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    with suppress(ChildProcessError):
        os.waitpid(child, 0)


def clear(user: int | None, proc: int | None) -> None:
    """Kill the remaining processes of the run, within `ENDING_S` seconds.

    If processes fork faster than they are found, some survive. These are still subject to the resource limits, and are
    killed with the process group.
    """
    until = time.monotonic() + ENDING_S
    while time.monotonic() < until:
        if user is not None:
            end_all_of(user)
        remaining = list(descendants(proc)) if proc is not None else []
        if not remaining:
            return
        for process in remaining:
            with suppress(OSError):
                os.kill(int(process), signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        time.sleep(PAUSE_S)


def main() -> None:
    status, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    os.set_inheritable(status, False)
    prctl(SET_CHILD_SUBREAPER, 1)
    prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    # The code may run as the same user: it must not read this process or its open files.
    prctl(SET_DUMPABLE, 0)
    proc = None
    with suppress(OSError):
        # Opened before the root changes, because there may be no other /proc.
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    if settings["root"] is not None:
        enter_new_root(settings)
    outcome = wait(start(settings), proc, settings)
    os.write(status, json.dumps(outcome).encode())
    if os.getpid() == 1:
        # The kernel ends the whole process namespace with its first process.
        return
    clear(settings["user"], proc)
    delete_shared_files(settings["user"])
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
