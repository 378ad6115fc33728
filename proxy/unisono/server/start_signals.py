"""Signals that arrive while a command starts, before its server handles them.

Without handlers, the system would end a process on SIGHUP, and ignore SIGTERM for the first process of a container.
"""

from __future__ import annotations

import signal
from types import FrameType


class StartSignals:
    """Signal handlers during the start.

    SIGTERM ends the start. SIGHUP is remembered: the configuration is reloaded once the server is up.
    """

    def __init__(self) -> None:
        self.is_reload_requested = False

    def handle(self) -> None:
        """Install handlers for both signals until the server installs its own."""
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGHUP, self._remember)

    def _end(self, number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.is_reload_requested = True
