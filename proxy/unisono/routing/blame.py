"""Attribution of failures to a deployment or to one client. Pure: the clock is an argument.

The identity of a client is its key, or something that identifies a repeated request. If all failures that would open a
circuit come from one identity, the deployment is suspected, and a probe decides whether the deployment or the client is
the cause. Probes of pass-through deployments generate nothing. For these deployments, the client is the cause if
another request was served since the first failure.
"""

from __future__ import annotations

from typing import Final

from unisono.errors import BackendError, Symptom, UnisonoError
from unisono.routing.circuit_breaker import BreakerConfig, Circuits, after_acquittal, after_confirmation, suspected

# Minimum seconds between probes of a suspect.
PROBE_EVERY_S: Final = 1.0
# Upper bound of the probe interval in seconds. The interval doubles with every passed probe, because a client whose
# requests always fail must not cause constant probing.
PROBE_SELDOM_S: Final = 30.0
# Seconds for which a passed probe lengthens the probe interval.
ACQUITTAL_COUNTS_S: Final = 300.0


def is_independent(error: UnisonoError) -> bool:
    """Return whether `error` cannot have been caused by any request."""
    return isinstance(error, BackendError) and error.symptom is Symptom.NO_CONNECTION


class Suspicion:
    """Suspicion that one deployment fails, while all failures come from a single client.

    `since` is the start of the suspicion in monotonic seconds; None if the deployment is not suspected.
    """

    def __init__(self) -> None:
        self.since: float | None = None
        self._served_from = 0.0
        self._acquittals = 0
        self._acquitted_at = 0.0

    def served(self, started_at: float, now: float) -> None:
        """Record that a request which started at `started_at` was served."""
        self._served_from = max(self._served_from, min(started_at, now))

    def failed(self, circuits: Circuits, tolerance: BreakerConfig, now: float) -> bool:
        """Update the suspicion after a failure; return whether the deployment is now suspected.

        `circuits` are the circuits after the failure. `tolerance` says how many failures open a circuit.
        """
        if not suspected(circuits, tolerance):
            self.since = None
        elif self.since is None:
            self.since = now
        return self.since is not None

    def has_served(self, circuits: Circuits, tolerance: BreakerConfig) -> bool:
        """Return whether a request that began after the first of the suspected failures was served."""
        return all(circuits[kind].since < self._served_from for kind in suspected(circuits, tolerance))

    def is_due(self, now: float, probed_at: float) -> bool:
        """Return whether to probe a suspect again; `probed_at` is when the last probe ended."""
        acquittals = self._acquittals if now - self._acquitted_at < ACQUITTAL_COUNTS_S else 0
        return now - probed_at >= min(PROBE_EVERY_S * 2.0**acquittals, PROBE_SELDOM_S)

    def judged(
        self, circuits: Circuits, tolerance: BreakerConfig, now: float, *, fails: bool, jitter: float
    ) -> Circuits:
        """Settle the suspicion and return the resulting circuits.

        If the deployment itself `fails`, the suspected circuits open. Otherwise the failures of the suspected
        identities are removed.
        """
        self.since = None
        if fails:
            self._acquittals = 0
            return after_confirmation(circuits, now, tolerance, jitter)
        self._acquittals, self._acquitted_at = min(self._acquittals + 1, 10), now
        return after_acquittal(circuits, tolerance)
