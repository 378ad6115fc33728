"""Retries of failed deployments: the budget of a group for them, and the pauses before them.

When every deployment is too busy, each retry makes things worse. Retries are paid from a balance to which every request
adds a tenth of a retry, so retries add at most a tenth to the load. In quiet hours, a reserve pays for retries, so that
one dead deployment does not cost an answer. A cap on concurrent retries would not work: if a deployment refuses within
a millisecond, there are never many retries in flight.
"""

from __future__ import annotations

from random import uniform
from typing import Final

# Number of retries that each request adds to the balance, and so the share that retries may add to the load.
SHARE: Final = 0.1
# Retries that a quiet group can always afford; refilled within `RESERVE_S` seconds. Enough for two deployments to
# fail until their circuits open.
RESERVE: Final = 10.0
RESERVE_S: Final = 10.0


class RetryBudget:
    """Retry balance of one group. `now` is monotonic seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self._balance = RESERVE
        self._at = now

    def add_request(self, in_flight: int, now: float) -> None:
        """Add to the balance for a new request while `in_flight` other requests are in progress."""
        self._grow(now)
        most = max(RESERVE, SHARE * in_flight)
        if self._balance < most:
            self._balance = min(self._balance + SHARE, most)

    def pay(self, now: float) -> bool:
        """Pay for a retry; return False if the balance is too low."""
        self._grow(now)
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True

    def affords(self, now: float) -> bool:
        """Return whether the balance is sufficient for a retry, without paying."""
        self._grow(now)
        return self._balance >= 1.0

    def _grow(self, now: float) -> None:
        if self._balance < RESERVE:
            self._balance = min(RESERVE, self._balance + (now - self._at) * RESERVE / RESERVE_S)
        self._at = now


# Pause in seconds before the first retry of a failed deployment, as in LiteLLM. It doubles with every failure.
FIRST_PAUSE_S: Final = 0.5
# Upper bound of the pause, in seconds.
MAX_PAUSE_S: Final = 8.0
# Relative amount by which a pause varies at random, so that the clients of a restarted server do not return at once.
PAUSE_JITTER: Final = 0.25
# Longest `retry_after_s` that is waited for. A deployment that demands a longer pause is not retried.
MAX_RETRY_AFTER_S: Final = 60.0


def retry_pause_s(failures: int, asked_s: float) -> float:
    """Return the pause before the next retry, in seconds.

    `failures` is the number of earlier failures. The pause is never shorter than `asked_s`, the pause that the
    deployment demands.
    """
    pause_s = min(FIRST_PAUSE_S * 2.0**failures, MAX_PAUSE_S)
    # The pause varies so that clients do not return together.
    later_s = uniform(0, PAUSE_JITTER * min(asked_s, MAX_PAUSE_S))  # noqa: S311 - nothing secret
    return max(pause_s * uniform(1 - PAUSE_JITTER, 1 + PAUSE_JITTER), asked_s + later_s)  # noqa: S311
