"""Time limit of one answer across all backends; its clock can be stopped and resumed.

No I/O: the current time is an argument, in seconds of a monotonic clock.
"""

from __future__ import annotations

from unisono.core.generation import Timeouts


class Deadline:
    """Stopwatch for the time that an answer takes; it starts at `now` and can be stopped."""

    def __init__(self, now: float) -> None:
        self._running_since: float | None = now
        self._before = 0.0

    def spent(self, now: float) -> float:
        """Return the number of seconds counted until `now`."""
        return self._before + (0.0 if self._running_since is None else now - self._running_since)

    def stop(self, now: float) -> None:
        """Stop counting until `resume`."""
        self._before, self._running_since = self.spent(now), None

    def resume(self, now: float) -> None:
        if self._running_since is None:
            self._running_since = now

    def remaining(self, timeouts: Timeouts, now: float) -> Timeouts:
        """Return a deployment's time limits, each reduced to the time that is left for the answer.

        `total_s` of the result is the time that is left in seconds; 0 if no time is left.
        """
        total_s = max(timeouts.total_s - self.spent(now), 0.0)
        return Timeouts(
            connect_s=min(timeouts.connect_s, total_s),
            first_token_s=min(timeouts.first_token_s, total_s),
            silence_s=min(timeouts.silence_s, total_s),
            total_s=total_s,
        )
