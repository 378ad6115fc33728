"""What an engine process wrote before it ended, and how it ended, in words for a message."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

_LOG_BYTES = 8192
_QUOTED_LINES = 3
_QUOTED_CHARACTERS = 500
_LAST_WORDS_S = 0.5
"""How long the end of the output may take to be read; a grandchild could hold the pipe open for ever."""


class Log:
    """The last of what the process printed. A thread of its own reads it, so that a full pipe never blocks it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._kept = b""
        self._thread = threading.Thread(target=self._drain, args=(process,), name="mlx-engine-log", daemon=True)
        self._thread.start()

    def last_words(self) -> str:
        """The last lines of a process that has ended, as the tail of a message; empty when it printed nothing."""
        self._thread.join(_LAST_WORDS_S)
        return quoted(self._kept)

    def _drain(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdout is None:
            return
        with process.stdout as pipe:
            while piece := os.read(pipe.fileno(), 4096):
                self._kept = (self._kept + piece)[-_LOG_BYTES:]


def quoted(log: bytes) -> str:
    """The last lines of what a process wrote, as the tail of a message; empty when it wrote nothing."""
    lines = [line.strip() for line in log.decode("utf-8", errors="replace").splitlines() if line.strip()]
    if not lines:
        return ""
    last = " / ".join(lines[-_QUOTED_LINES:])[-_QUOTED_CHARACTERS:]
    return "; it last wrote: " + "".join(letter if letter.isprintable() else " " for letter in last)


def meaning(code: int) -> str:
    """How a process ended, in brackets."""
    if code >= 0:
        return f" (exit code {code})"
    try:
        return f" (killed by {signal.Signals(-code).name})"
    except ValueError:
        return f" (killed by signal {-code})"
