"""Last lines of output and exit status of an engine process, formatted for error messages."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

_LOG_BYTES = 8192
_QUOTED_LINES = 3
_QUOTED_CHARACTERS = 500
# Maximum seconds to wait for the end of the output. A child of the engine process could keep the pipe open.
_LAST_WORDS_S = 0.5


class Log:
    """Tail of a process's output.

    A thread reads the output, so that a full pipe never blocks the process.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._tail = b""
        self._thread = threading.Thread(target=self._drain, args=(process,), name="mlx-engine-log", daemon=True)
        self._thread.start()

    def last_lines(self) -> str:
        """Return the last output of an ended process, to append to an error message.

        Returns an empty string if there was no output.
        """
        self._thread.join(_LAST_WORDS_S)
        return quoted(self._tail)

    def _drain(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdout is None:
            return
        with process.stdout as pipe:
            while piece := os.read(pipe.fileno(), 4096):
                self._tail = (self._tail + piece)[-_LOG_BYTES:]


def quoted(log: bytes) -> str:
    """Return the last lines of `log`, to append to an error message; empty if `log` is blank."""
    lines = [line.strip() for line in log.decode("utf-8", errors="replace").splitlines() if line.strip()]
    if not lines:
        return ""
    last = " / ".join(lines[-_QUOTED_LINES:])[-_QUOTED_CHARACTERS:]
    return "; its last output: " + "".join(letter if letter.isprintable() else " " for letter in last)


def meaning(code: int) -> str:
    """Describe an exit code in parentheses.

    A negative code is the number of the signal that ended the process.
    """
    if code >= 0:
        return f" (exit code {code})"
    try:
        return f" (killed by {signal.Signals(-code).name})"
    except ValueError:
        return f" (killed by signal {-code})"
