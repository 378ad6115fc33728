"""The time that one answer has, however many backends it takes: its clock stands while it is somebody else's turn.

Pure: the time comes in as an argument, in seconds of any clock that never goes back.
"""

from __future__ import annotations

from dataclasses import replace

from unisono.core.generation import Timeouts


class Deadline:
    """Waiting and generating count, from the `now` it is made at."""

    def __init__(self, now: float) -> None:
        self._running_since: float | None = now
        self._before = 0.0

    def spent(self, now: float) -> float:
        """Seconds that count."""
        return self._before + (0.0 if self._running_since is None else now - self._running_since)

    def stop(self, now: float) -> None:
        """What follows counts for something else, until `go_on`."""
        self._before, self._running_since = self.spent(now), None

    def go_on(self, now: float) -> None:
        if self._running_since is None:
            self._running_since = now

    def left(self, timeouts: Timeouts, now: float) -> Timeouts:
        """What remains of a deployment's own times: nothing may take longer than all that is left. That is `total_s`,
        0 when it is over."""
        total_s = max(timeouts.total_s - self.spent(now), 0.0)
        return replace(
            timeouts,
            connect_s=min(timeouts.connect_s, total_s),
            first_token_s=min(timeouts.first_token_s, total_s),
            silence_s=min(timeouts.silence_s, total_s),
            total_s=total_s,
        )
