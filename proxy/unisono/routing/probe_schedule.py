"""Schedule of the probes of one deployment.

The schedule determines when the next probe is due, and how long the error of a failed probe is reused. Pure: times are
arguments, in seconds of one monotonic clock.
"""

from __future__ import annotations

from typing import Final

from unisono.routing.circuit_breaker import CircuitPhase

FAILURE_REMEMBERED_S: Final = 2.0  # during which the error of a failed probe is reused
DOUBTED_EVERY_S: Final = 1.0  # between probes of a deployment that may have died or recently did
# Seconds during which an unreachable deployment is expected back soon, because a supervisor restarts it.
BACK_SOON_S: Final = 60.0
FAILING_EVERY_S: Final = 4.0  # between probes of a deployment that fails otherwise, hangs, or does not come back
CHECK_EVERY_S: Final = 30.0  # between probes of a healthy deployment that is not used
# Upper bound of this interval, which doubles while the deployment is idle. So a laptop can unload its model.
MAX_IDLE_PROBE_INTERVAL_S: Final = 600.0
# Upper bound of the pause between probes of an unfit deployment. Probes are rare because each one generates tokens.
MAX_UNFIT_PROBE_PAUSE_S: Final = 30.0
MAX_DOUBLINGS: Final = 10


class ProbeSchedule:
    """Schedule of the probes of one deployment."""

    # Rules, in this order.
    # - A deployment that may have died is probed at once, and then every `DOUBTED_EVERY_S`.
    # - A half-open circuit is probed before the first client's request.
    # - If the circuit is open and the deployment is reachable, it is not probed: a passed probe would prove nothing.
    # - A failing deployment is probed every `FAILING_EVERY_S`, or more often while it is expected back soon.
    # - The pauses between the probes of an unfit deployment grow, and so do those of an idle one.

    def __init__(self) -> None:
        self.started_at = 0.0  # start of the last probe
        self.ended_at = 0.0
        self.is_doubted = False  # True if a request failed as if the deployment were dead, and no probe began since
        self.unreachable_since: float | None = None  # when a probe found it unreachable
        self._used_at = 0.0
        self._unfit = 0  # consecutive probes that found it unfit
        self._idle = 0  # consecutive good probes without a use between them

    def record_use(self, now: float) -> None:
        self._used_at, self._idle = now, 0

    def record_start(self, now: float) -> None:
        self.is_doubted, self.started_at = False, now

    def record_error(self, *, is_unreachable: bool) -> None:
        """Record that the last probe ended in an error."""
        self._unfit = self._idle = 0
        if is_unreachable and self.unreachable_since is None:
            self.unreachable_since = self.ended_at

    def record_unfit(self) -> None:
        """Record that the last probe found the deployment unfit."""
        self._unfit, self._idle = min(self._unfit + 1, MAX_DOUBLINGS), 0

    def record_pass(self, *, was_known: bool) -> None:
        """Record that the last probe passed; `was_known` means that an earlier probe had passed too."""
        self._unfit, self._idle = 0, min(self._idle + 1, MAX_DOUBLINGS) if was_known else 0

    def has_recent_failure(self, now: float) -> bool:
        """Return whether the last probe is so recent that the error of its failure can be reused."""
        return now - self.ended_at < self._failure_valid_s

    @property
    def _failure_valid_s(self) -> float:
        return min(FAILURE_REMEMBERED_S * 2.0 ** max(self._unfit - 1, 0), MAX_UNFIT_PROBE_PAUSE_S)

    def is_expected_back(self, now: float) -> bool:
        """Return whether the deployment became unreachable so recently that it may be back soon."""
        return self.unreachable_since is not None and now - self.unreachable_since < BACK_SOON_S

    def is_due(self, now: float, phase: CircuitPhase, *, is_failing: bool, is_known: bool) -> bool:
        """Return whether a probe is due, for a deployment without any special reason for a probe.

        `phase` is the phase of the deployment's circuits. `is_failing` means that the last probe failed. `is_known`
        means that an earlier probe passed, and no cooldown has begun since.
        """
        since = now - self.ended_at
        if phase is CircuitPhase.HALF_OPEN:
            return True
        if phase is CircuitPhase.OPEN and self.unreachable_since is None:
            return False
        if is_failing or self.unreachable_since is not None:
            soon = DOUBTED_EVERY_S if self.is_expected_back(now) else FAILING_EVERY_S
            return since >= (self._failure_valid_s if self._unfit else soon)
        pause = min(CHECK_EVERY_S * 2.0**self._idle, MAX_IDLE_PROBE_INTERVAL_S)
        return not is_known or now - max(self.ended_at, self._used_at) >= pause
