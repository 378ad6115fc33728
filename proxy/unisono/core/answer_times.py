"""Times of one answer: its time limit across all backends, and the times between its tokens.

No I/O: the current time is an argument, in seconds of a monotonic clock.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

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


# Upper bounds of the histogram of times between tokens, in seconds. The last bucket has no upper bound.
GAPS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0)


class Pace:
    """Timing of the tokens of one generation, in seconds of a monotonic clock."""

    __slots__ = ("_last", "first", "gaps", "largest_gap_s", "tokens")

    def __init__(self) -> None:
        self.first: float | None = None
        self.tokens = 0
        # Number of gaps in each bucket of `GAPS_S`; empty before the first token.
        self.gaps: list[int] = []
        self.largest_gap_s = 0.0
        self._last = 0.0

    @property
    def gaps_s(self) -> float:
        """Sum of all gaps."""
        return 0.0 if self.first is None else self._last - self.first

    def record(self, tokens: int, now: float) -> None:
        """Record that `tokens` (at least one) arrived at `now`; the gap is divided among them."""
        if self.first is None:
            self.first = now
            # Between tokens that arrive together with the first token, there is no gap.
            self.gaps = [0] * (len(GAPS_S) + 1)
        else:
            gap = now - self._last
            if gap > self.largest_gap_s:
                self.largest_gap_s = gap
            self.gaps[bisect_left(GAPS_S, gap / tokens)] += tokens
        self.tokens += tokens
        self._last = now
