"""Times between the tokens of one generation, for metrics and request records."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

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
