"""Pauses before a failed deployment is retried."""

from __future__ import annotations

from random import uniform
from typing import Final

# The same pauses between retries as LiteLLM.
# Pause before a failed deployment is retried, in seconds; doubles with every failure.
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
