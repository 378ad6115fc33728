"""Attempts on one deployment that wait for their first token, and the probes they trigger.

No I/O and no timers: times are arguments, in seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final

# Shortest wait that triggers a probe, in seconds. Under a tighter limit the probe could not finish in time either.
MIN_WAIT_S: Final = 1.0


@dataclass(eq=False, slots=True)
class FirstTokenWait:
    """One attempt. `unread_tokens` is the part of its prompt that is expected not to be cached."""

    unread_tokens: int
    probe_at: float
    on_failed_probe: Callable[[], None] | None = None


def probe_due_at(now: float, limit_s: float) -> float:
    """Return the time at which an attempt that begins now triggers a probe.

    That is after half of its first-token limit.
    """
    return now + max(limit_s / 2, MIN_WAIT_S)


class GenerationActivity:
    """Attempts on a deployment past their first token, and the time of its last generation."""

    def __init__(self) -> None:
        self._running = 0
        self._last_at = 0.0

    def start_generation(self, now: float) -> None:
        self._running += 1
        self._last_at = now

    def end(self, now: float) -> None:
        self._running -= 1
        self._last_at = now

    def last_at(self, now: float) -> float:
        """Return when the deployment last generated for this process: `now` if it still does."""
        return now if self._running else self._last_at


class FirstTokenWaits:
    """Attempts on one deployment that wait for their first token.

    `unread_tokens` is the number of prompt tokens that the deployment still has to read for them.
    """

    def __init__(self) -> None:
        self.unread_tokens = 0
        # Callback that receives the time at which a new attempt triggers a probe.
        self.on_probe_at: Callable[[float], None] | None = None
        self._waits: set[FirstTokenWait] = set()

    def __len__(self) -> int:
        return len(self._waits)

    @property
    def next_probe_at(self) -> float:
        """Time of the next due probe; infinity if no attempt waits."""
        return min((wait.probe_at for wait in self._waits), default=inf)

    def add(self, wait: FirstTokenWait) -> None:
        self._waits.add(wait)
        self.unread_tokens += wait.unread_tokens
        if self.on_probe_at is not None:
            self.on_probe_at(wait.probe_at)

    def remove(self, wait: FirstTokenWait) -> None:
        """Remove an attempt that no longer waits; no effect if it was removed before."""
        if wait in self._waits:
            self._waits.remove(wait)
            self.unread_tokens -= wait.unread_tokens

    def postpone_probes(self, until: float) -> None:
        """Request no probe before `until`, because one begins now."""
        for wait in self._waits:
            wait.probe_at = max(wait.probe_at, until)

    def report_failed_probe(self) -> None:
        for wait in tuple(self._waits):
            if wait.on_failed_probe is not None:
                wait.on_failed_probe()
