"""Circuit breaker of a deployment. Pure: the clock and the jitter are arguments.

Each kind of failure has its own circuit. A few failures in a row open the circuit; if there are successes between the
failures, a few more are needed. After the cooldown, the circuit is half open. Two successes then close it, and one more
failure opens it for twice as long as before. Requests that the backend rejects are no failures.

One client cannot open a circuit. If all failures come from one identity (a key, or a repeated request), the
deployment is suspected and a probe decides: the circuit opens, or the failures are discarded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from math import inf
from typing import Final

from unisono.core.frozen import dataclass
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendProtocolError,
    BackendRejected,
    BackendTimeout,
    BackendUnavailable,
    BackendUnfit,
    UnisonoError,
)

# Number of successes that compensate for one failure. If more than one request in four fails, the circuit opens even
# without two failures in a row. One failure in a hundred requests is compensated.
FORGIVING: Final = 3
# Number of successes that close a half-open circuit.
CLOSING: Final = 2
# Upper bound of the growing cooldown in seconds, unless the configured one is longer.
MAX_COOLDOWN_S: Final = 300.0
# Cooldown of an overloaded deployment that sends no `retry_after_s`, in seconds.
BREATH_S: Final = 1.0


class BreakerFailure(StrEnum):
    """Kinds of failure that the circuit breaker distinguishes."""

    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    OVERLOADED = "overloaded"
    PROTOCOL = "protocol"
    ERROR = "error"


# Kind of failure by error type. The first matching row applies; None means that the error is not a failure.
KINDS: Final[tuple[tuple[type[UnisonoError], BreakerFailure | None], ...]] = (
    # An unfit deployment is excluded by its probe, so it needs no cooldown.
    (BackendUnfit, None),
    (BackendRejected, None),
    (BackendUnavailable, BreakerFailure.UNREACHABLE),
    (BackendTimeout, BreakerFailure.TIMEOUT),
    (BackendOverloaded, BreakerFailure.OVERLOADED),
    (BackendProtocolError, BreakerFailure.PROTOCOL),
    (BackendError, BreakerFailure.ERROR),
    (UnisonoError, None),
)


def kind_of(error: UnisonoError) -> BreakerFailure | None:
    for row, kind in KINDS:
        if isinstance(error, row):
            return kind
    raise AssertionError(error)


class CircuitPhase(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """Tolerance of one kind of failure.

    `allowed_fails` failures are tolerated if no successes compensate for them. The next failure opens the circuit for
    `cooldown_s` seconds.
    """

    allowed_fails: int = 3
    cooldown_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Circuit:
    """State of the circuit for one kind of failure.

    `failures` counts consecutive failures. `owed` is the number of successes that would compensate for all failures
    since `since`. `rests` counts consecutive cooldowns, `successes` the successes since the last cooldown began. The
    circuit is open from `since` until `until`, in monotonic seconds. `blamed` is the identity (a key, or a repeated
    request) that caused all failures since the last cooldown. It is empty before the first failure. It is None if
    several identities caused failures, or if no request can have caused them.
    """

    failures: int = 0
    owed: int = 0
    rests: int = 0
    since: float = 0.0
    until: float = 0.0
    successes: int = 0
    blamed: str | None = ""

    def phase(self, now: float) -> CircuitPhase:
        if not self.rests:
            return CircuitPhase.CLOSED
        return CircuitPhase.OPEN if now < self.until else CircuitPhase.HALF_OPEN


# Circuits by kind of failure. A kind that is missing has a new circuit, which is closed.
Circuits = Mapping[BreakerFailure, Circuit]

NEW: Final = Circuit()


def after_failure(
    circuits: Circuits,
    error: UnisonoError,
    now: float,
    tolerance: BreakerConfig,
    jitter: float = 1.0,
    *,
    identity: str = "",
) -> Circuits:
    """Return the circuits after a failure.

    `jitter` is a factor near 1 for the length of the cooldown. It prevents many gateways from retrying at once.
    `identity` identifies the client of the failed request; empty if the client cannot be the cause.
    """
    kind = kind_of(error)
    if kind is None:
        return circuits
    circuit = circuits.get(kind, NEW)
    if kind is BreakerFailure.OVERLOADED:
        return {**circuits, kind: _overloaded(circuit, error.retry_after_s, now, tolerance, jitter)}
    # If the circuits of other kinds are half open, the failure shows that the deployment has not recovered.
    circuits = {
        other: _reopen(tried, identity, now, tolerance, jitter)
        if other not in (kind, BreakerFailure.OVERLOADED) and tried.phase(now) is CircuitPhase.HALF_OPEN
        else tried
        for other, tried in circuits.items()
    }
    match circuit.phase(now):
        case CircuitPhase.OPEN:
            # The request began before the circuit opened; the cooldown is long enough.
            return circuits
        case CircuitPhase.HALF_OPEN:
            opened = _reopen(circuit, identity, now, tolerance, jitter)
        case CircuitPhase.CLOSED:
            opened = replace(
                circuit,
                failures=circuit.failures + 1,
                owed=circuit.owed + FORGIVING,
                since=circuit.since if circuit.owed else now,
                blamed=_blamed(circuit, identity),
            )
            if opened.blamed is None and _is_due(opened, tolerance):
                opened = _rested(opened, now, tolerance, jitter)
    return {**circuits, kind: opened}


def suspected(circuits: Circuits, tolerance: BreakerConfig) -> Mapping[BreakerFailure, str]:
    """Return the kinds of failure for which the deployment is suspected, each with a client.

    This client caused all failures of the kind, and there are enough failures to open the circuit. A probe has to
    decide whether the deployment or the client is the cause.
    """
    return {
        kind: circuit.blamed
        for kind, circuit in circuits.items()
        if circuit.blamed and not circuit.rests and _is_due(circuit, tolerance)
    }


def after_confirmation(circuits: Circuits, now: float, tolerance: BreakerConfig, jitter: float = 1.0) -> Circuits:
    """Open the suspected circuits, because a probe failed too."""
    suspects = suspected(circuits, tolerance)
    return {
        kind: _rested(circuit, now, tolerance, jitter) if kind in suspects else circuit
        for kind, circuit in circuits.items()
    }


def after_acquittal(circuits: Circuits, tolerance: BreakerConfig) -> Circuits:
    """Discard the failures of the suspected clients, because the deployment passed a probe."""
    identities = set(suspected(circuits, tolerance).values())
    return {kind: circuit for kind, circuit in circuits.items() if circuit.rests or circuit.blamed not in identities}


def after_success(circuits: Circuits, started_at: float = inf, *, probed: bool = False) -> Circuits:
    """Return the circuits after a success.

    A circuit that has opened needs `CLOSING` successes to close. A request that began before the circuit opened does
    not count; `started_at` is when the request began. `probed` is True for the success of a probe. In a closed circuit,
    such a success does not compensate for failures, because each failed request can trigger a probe.
    """
    after = {}
    for kind, circuit in circuits.items():
        if circuit.rests:
            if started_at < circuit.since:
                after[kind] = circuit
            elif circuit.successes + 1 < CLOSING:
                after[kind] = replace(circuit, successes=circuit.successes + 1)
        elif probed:
            after[kind] = circuit
        elif circuit.owed > 1:
            after[kind] = replace(circuit, failures=0, owed=circuit.owed - 1)
    return after


def phase_of(circuits: Circuits, now: float) -> CircuitPhase:
    """Return the worst phase of all circuits. The circuit for overload is never half open."""
    worst = CircuitPhase.CLOSED
    for kind, circuit in circuits.items():
        phase = circuit.phase(now)
        if phase is CircuitPhase.OPEN:
            return phase
        if phase is CircuitPhase.HALF_OPEN and kind is not BreakerFailure.OVERLOADED:
            worst = phase
    return worst


def rests_for(circuits: Circuits, now: float) -> tuple[BreakerFailure, Circuit] | None:
    """Return the kind of failure with the longest cooldown, or None if all circuits are closed."""
    opened = [(kind, circuit) for kind, circuit in circuits.items() if circuit.phase(now) is not CircuitPhase.CLOSED]
    if phase_of(circuits, now) is CircuitPhase.CLOSED:
        return None
    return max(opened, key=lambda one: one[1].until)


def rests_until(circuits: Circuits) -> float:
    """Return the end of the cooldown in monotonic seconds; 0 if there is none."""
    return max((circuit.until for circuit in circuits.values() if circuit.rests), default=0.0)


def _is_due(circuit: Circuit, tolerance: BreakerConfig) -> bool:
    return circuit.owed > tolerance.allowed_fails * FORGIVING


def _blamed(circuit: Circuit, identity: str) -> str | None:
    return identity if identity and circuit.blamed in ("", identity) else None


def _reopen(circuit: Circuit, identity: str, now: float, tolerance: BreakerConfig, jitter: float) -> Circuit:
    """Open a half-open circuit again, unless a single client may have caused all failures."""
    blamed = _blamed(circuit, identity)
    if blamed is None:
        return _rested(circuit, now, tolerance, jitter)
    return replace(circuit, successes=0, blamed=blamed)


def _rested(circuit: Circuit, now: float, tolerance: BreakerConfig, jitter: float) -> Circuit:
    longest = max(MAX_COOLDOWN_S, tolerance.cooldown_s)
    length = min(tolerance.cooldown_s * 2.0 ** min(circuit.rests, 32), longest)
    return Circuit(circuit.failures, circuit.owed, rests=circuit.rests + 1, since=now, until=now + length * jitter)


def _overloaded(
    circuit: Circuit, retry_after_s: float | None, now: float, tolerance: BreakerConfig, jitter: float
) -> Circuit:
    """Open the circuit for `retry_after_s` seconds, but at most for the configured cooldown.

    Without `retry_after_s`, use a short cooldown that doubles while the overload lasts.
    """
    pause_s = BREATH_S * 2.0 ** min(circuit.rests, 32) if retry_after_s is None else max(retry_after_s, 0.0)
    until = now + min(pause_s, tolerance.cooldown_s) * (jitter if retry_after_s is None else 1.0)
    if circuit.phase(now) is CircuitPhase.OPEN:
        # Several requests were refused at once.
        return replace(circuit, failures=circuit.failures + 1, until=max(until, circuit.until))
    return Circuit(circuit.failures + 1, rests=circuit.rests + 1, since=now, until=until)
