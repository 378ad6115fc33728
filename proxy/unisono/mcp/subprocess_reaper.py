"""Reaper that kills tool server processes if the gateway itself is killed.

At an orderly shutdown, the gateway ends these processes itself. A killed gateway cannot do so, and a busy server does
not notice that its input is closed. Therefore a small watcher process receives the list of process groups. When the
gateway ends, the input of the watcher closes, and the watcher kills the remaining groups. The watcher runs only while
there are groups to watch.
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
# This process ends when its input closes. A signal to all processes must not end it before the watched processes.
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
    """Current process groups and the process that watches them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[int] = set()
        self._watcher: subprocess.Popen[bytes] | None = None

    def add(self, group: int) -> None:
        """Watch `group`. Raises OSError if the watcher process cannot be started."""
        with self._lock:
            self._groups.add(group)
            if self._watcher is None or not _send(self._watcher, b"+%d\n" % group):
                # There is no watcher, or it has died, and its list of groups is lost.
                self._end()
                self._start()

    def end(self, group: int) -> None:
        """Stop watching `group`. After the last group, wait until the watcher process has ended."""
        with self._lock:
            self._groups.discard(group)
            if not self._groups:
                self._end()
            elif self._watcher is not None:
                _send(self._watcher, b"-%d\n" % group)

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
        _send(self._watcher, b"".join(b"+%d\n" % group for group in sorted(self._groups)))

    def _end(self) -> None:
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


# Watch of this process.
WATCH: Final = Watch()


def _send(watcher: subprocess.Popen[bytes], line: bytes) -> bool:
    """Write a line to the watcher, and return False if it is gone."""
    assert watcher.stdin is not None
    try:
        os.write(watcher.stdin.fileno(), line)
    except OSError:
        return False
    return True
