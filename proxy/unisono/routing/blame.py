"""Whether a deployment fails by itself, or on what one client asks of it: pure, the clock comes in as an argument.

A client is known by an identity: its key, or what is odd about its request. Where all failures that would open a
circuit come from one identity, the deployment is suspected, and a probe decides. Probes of pass-through deployments
generate nothing; there a request that was served since the first failure decides.
"""

from __future__ import annotations

from typing import Final

from unisono.core.symptom import Symptom
from unisono.errors import BackendError, UnisonoError
from unisono.routing.circuit_breaker import BreakerConfig, Circuits, after_acquittal, after_confirmation, suspected

PROBE_EVERY_S: Final = 1.0
"""Between probes of a suspect, in seconds."""
PROBE_SELDOM_S: Final = 30.0
"""What that grows to, doubling with every probe that goes well: a client that fails all the time must not have the
deployment probed all the time."""
ACQUITTAL_COUNTS_S: Final = 300.0
"""How long a probe that went well makes the next one less urgent, in seconds."""


def is_independent(error: UnisonoError) -> bool:
    """Whether no request can have caused it."""
    return isinstance(error, BackendError) and error.symptom is Symptom.NO_CONNECTION


class Suspicion:
    """What is suspected of one deployment. `since` is when (monotonic seconds), None while nothing is."""

    def __init__(self) -> None:
        self.since: float | None = None
        self._served_from = 0.0
        self._acquittals = 0
        self._acquitted_at = 0.0

    def served(self, begun: float, now: float) -> None:
        """A request that had `begun` then was served."""
        self._served_from = max(self._served_from, min(begun, now))

    def failed(self, circuits: Circuits, tolerance: BreakerConfig, now: float) -> bool:
        """A request failed, which left these circuits. Returns whether there is suspicion."""
        if not suspected(circuits, tolerance):
            self.since = None
        elif self.since is None:
            self.since = now
        return self.since is not None

    def has_served(self, circuits: Circuits, tolerance: BreakerConfig) -> bool:
        """Whether a request was served that began after the first of the failures."""
        return all(circuits[kind].since < self._served_from for kind in suspected(circuits, tolerance))

    def is_due(self, now: float, probed_at: float) -> bool:
        """Whether a suspect is to be probed again."""
        acquittals = self._acquittals if now - self._acquitted_at < ACQUITTAL_COUNTS_S else 0
        return now - probed_at >= min(PROBE_EVERY_S * 2.0**acquittals, PROBE_SELDOM_S)

    def judged(
        self, circuits: Circuits, tolerance: BreakerConfig, now: float, *, fails: bool, jitter: float
    ) -> Circuits:
        """It is known whether the deployment fails by itself. Returns its circuits: those opened that it was suspected
        for, or without the failures of the identities that were suspected."""
        self.since = None
        if fails:
            self._acquittals = 0
            return after_confirmation(circuits, now, tolerance, jitter)
        self._acquittals, self._acquitted_at = min(self._acquittals + 1, 10), now
        return after_acquittal(circuits, tolerance)
