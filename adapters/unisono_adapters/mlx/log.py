"""Final output and exit status of an engine process, formatted for messages."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

_LOG_BYTES = 8192
_QUOTED_LINES = 3
_QUOTED_CHARACTERS = 500
# Seconds allowed for reading the final output; a grandchild could keep the pipe open.
_LAST_WORDS_S = 0.5


class Log:
    """Tail of the process's output, read in a thread so that a full pipe never blocks it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._tail = b""
        self._thread = threading.Thread(target=self._drain, args=(process,), name="mlx-engine-log", daemon=True)
        self._thread.start()

    def last_lines(self) -> str:
        """Return the last lines of an ended process as the tail of a message, or an empty string."""
        self._thread.join(_LAST_WORDS_S)
        return quoted(self._tail)

    def _drain(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdout is None:
            return
        with process.stdout as pipe:
            while piece := os.read(pipe.fileno(), 4096):
                self._tail = (self._tail + piece)[-_LOG_BYTES:]


def quoted(log: bytes) -> str:
    """Return the last lines of an output as the tail of a message, or an empty string."""
    lines = [line.strip() for line in log.decode("utf-8", errors="replace").splitlines() if line.strip()]
    if not lines:
        return ""
    last = " / ".join(lines[-_QUOTED_LINES:])[-_QUOTED_CHARACTERS:]
    return "; its last output: " + "".join(letter if letter.isprintable() else " " for letter in last)


def meaning(code: int) -> str:
    """Describe an exit code in brackets."""
    if code >= 0:
        return f" (exit code {code})"
    try:
        return f" (killed by {signal.Signals(-code).name})"
    except ValueError:
        return f" (killed by signal {-code})"
