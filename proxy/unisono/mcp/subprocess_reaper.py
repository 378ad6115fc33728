"""Tool servers that are processes do not outlive the gateway, however it ends.

At an orderly end the gateway ends them itself. One that is killed cannot, and a server that is busy does not notice
that nobody listens any more. So one small process watches: it is told which process groups there are, and ends those
that are left when the gateway is gone, which it knows by the end of its input. It is there as long as any group is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Final

WATCHING: Final = """
import os, signal, sys
# It ends with its input. A signal to everybody must not end it before those it watches.
for each in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(each, signal.SIG_IGN)
groups = set()
for line in sys.stdin.buffer:
    (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""
LEAVING_S: Final = 5.0


class Watch:
    """The groups there are now, and the process that watches them. For all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[int] = set()
        self._watcher: subprocess.Popen[bytes] | None = None

    def begin(self, group: int) -> None:
        """Watch `group`. Raises OSError when no process can be started for it."""
        with self._lock:
            self._groups.add(group)
            if self._watcher is None or not _told(self._watcher, b"+%d\n" % group):
                # Whoever was there before is gone, and with it what it knew.
                self._leave()
                self._start()

    def end(self, group: int) -> None:
        """`group` is no more. Takes a moment when it was the last one."""
        with self._lock:
            self._groups.discard(group)
            if not self._groups:
                self._leave()
            elif self._watcher is not None:
                _told(self._watcher, b"-%d\n" % group)

    def _start(self) -> None:
        self._watcher = subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", "-S", "-c", WATCHING],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,
        )
        _told(self._watcher, b"".join(b"+%d\n" % group for group in sorted(self._groups)))

    def _leave(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is None:
            return
        assert watcher.stdin is not None
        with suppress(OSError):
            watcher.stdin.close()
        try:
            watcher.wait(LEAVING_S)
        except subprocess.TimeoutExpired:
            watcher.kill()
            watcher.wait()


WATCH: Final = Watch()
"""The one of this process."""


def _told(watcher: subprocess.Popen[bytes], line: bytes) -> bool:
    """Whether it is still there to be told."""
    assert watcher.stdin is not None
    try:
        os.write(watcher.stdin.fileno(), line)
    except OSError:
        return False
    return True
