"""How many second tries a group may afford: pure, the clock comes in as an argument.

When every deployment is too busy, each request that is tried again makes it worse. Tries are paid from a balance that
requests fill, a tenth of a try each, so that tries never add more than a tenth to the load; what lies in reserve is for
the quiet hours, when one dead deployment must not cost anybody an answer. A cap in tries at once would not do: a
deployment that refuses in a millisecond never has many tries running, however many there were.
"""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.1
"""What a request pays in: the share that tries may add to the load."""
RESERVE: Final = 10.0
"""Tries that a quiet group can always afford, and that come back within `RESERVE_S` seconds: enough for two deployments
to fail until they rest."""
RESERVE_S: Final = 10.0


class RetryBudget:
    """The balance of one group. `now` is monotonic seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self._balance = RESERVE
        self._at = now

    def asked(self, in_flight: int, now: float) -> None:
        """A request came in, beside `in_flight` others."""
        self._grow(now)
        most = max(RESERVE, SHARE * in_flight)
        if self._balance < most:
            self._balance = min(self._balance + SHARE, most)

    def pay(self, now: float) -> bool:
        """Pay for a second try; False when there is nothing left."""
        self._grow(now)
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True

    def affords(self, now: float) -> bool:
        """Whether `pay` would find enough."""
        self._grow(now)
        return self._balance >= 1.0

    def _grow(self, now: float) -> None:
        if self._balance < RESERVE:
            self._balance = min(RESERVE, self._balance + (now - self._at) * RESERVE / RESERVE_S)
        self._at = now
