"""When a deployment rests: pure, the clock and the jitter come in as arguments.

Each way to fail has a circuit of its own. Failures open it, so many in a row or somewhat more with successes between
them, and the deployment rests; after that it is half open, and two successes close it. One more failure, and it rests
twice as long as before. A request that was wrong never counts.

One client cannot open a circuit. Failures that all come from one identity (a key, or a request that is repeated) make
the deployment a suspect instead, and a probe decides: the circuit opens, or the failures are forgiven.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import Final

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

FORGIVING: Final = 3
"""Successes that make up for a failure: what fails more often than every fourth time comes to rest, be it never twice
in a row, and what fails once in a hundred has long made up for it."""
CLOSING: Final = 2
"""Successes that close a circuit."""
REST_AT_MOST_S: Final = 300.0
"""What resting grows to, in seconds, where the configured time is not longer itself."""
BREATH_S: Final = 1.0
"""How long an overloaded deployment that does not say when to come back is left alone, in seconds."""


class BreakerFailure(StrEnum):
    """The kinds."""

    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    OVERLOADED = "overloaded"
    PROTOCOL = "protocol"
    ERROR = "error"


KINDS: Final[tuple[tuple[type[UnisonoError], BreakerFailure | None], ...]] = (
    # What is wrong with a deployment that is unfit its probe knows; it needs no rest.
    (BackendUnfit, None),
    (BackendRejected, None),
    (BackendUnavailable, BreakerFailure.UNREACHABLE),
    (BackendTimeout, BreakerFailure.TIMEOUT),
    (BackendOverloaded, BreakerFailure.OVERLOADED),
    (BackendProtocolError, BreakerFailure.PROTOCOL),
    (BackendError, BreakerFailure.ERROR),
    (UnisonoError, None),
)
"""What an error says of the deployment; the first row that fits, None for nothing."""


def kind_of(error: UnisonoError) -> BreakerFailure | None:
    return next(kind for row, kind in KINDS if isinstance(error, row))


class CircuitPhase(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """A deployment may fail `allowed_fails` times in one way without successes that make up for it; with the next
    failure it rests for `cooldown_s`."""

    allowed_fails: int = 3
    cooldown_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Circuit:
    """Of one kind of failure. `failures` counts those in a row; `owed` are the successes that would make up for these
    and for earlier ones, the first of which came at `since`. `rests` counts the rests in a row, `successes` those since
    the last one began; it rests from `since` until `until` (monotonic seconds). `blamed` is the identity that all
    failures come from, since the last rest if there was one: empty before the first, None for several identities and
    for failures that no request can cause."""

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


Circuits = Mapping[BreakerFailure, Circuit]
"""Those that are not as new; what is not there is closed."""

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
    """`jitter` is a factor around 1, so that many gateways do not come back at one moment. `identity` tells who the
    request came from, empty where that makes no difference to the failure."""
    kind = kind_of(error)
    if kind is None:
        return circuits
    circuit = circuits.get(kind, NEW)
    if kind is BreakerFailure.OVERLOADED:
        return {**circuits, kind: _overloaded(circuit, error.retry_after_s, now, tolerance, jitter)}
    # One that fails in another way than before is not well again either.
    circuits = {
        other: _failed_again(tried, identity, now, tolerance, jitter)
        if other not in (kind, BreakerFailure.OVERLOADED) and tried.phase(now) is CircuitPhase.HALF_OPEN
        else tried
        for other, tried in circuits.items()
    }
    match circuit.phase(now):
        case CircuitPhase.OPEN:
            # It began before the rest, which is long enough as it is.
            return circuits
        case CircuitPhase.HALF_OPEN:
            opened = _failed_again(circuit, identity, now, tolerance, jitter)
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
    """The kinds of failure that only one identity had, as often as opens a circuit, with that identity: a probe has to
    tell whether the deployment fails, or what is asked of it."""
    return {
        kind: circuit.blamed
        for kind, circuit in circuits.items()
        if circuit.blamed and not circuit.rests and _is_due(circuit, tolerance)
    }


def after_confirmation(circuits: Circuits, now: float, tolerance: BreakerConfig, jitter: float = 1.0) -> Circuits:
    """A probe failed too: what was suspected opens."""
    suspects = suspected(circuits, tolerance)
    return {
        kind: _rested(circuit, now, tolerance, jitter) if kind in suspects else circuit
        for kind, circuit in circuits.items()
    }


def after_acquittal(circuits: Circuits, tolerance: BreakerConfig) -> Circuits:
    """A probe went well: failures of the identities that were suspected of having caused them are forgotten."""
    identities = set(suspected(circuits, tolerance).values())
    return {kind: circuit for kind, circuit in circuits.items() if circuit.rests or circuit.blamed not in identities}


def after_success(circuits: Circuits, begun: float = inf, *, probed: bool = False) -> Circuits:
    """What had a consequence needs `CLOSING` of them, and what had begun before it says nothing of how it is since.
    What had none is made up for by requests alone: a probe is no answer to one that failed, and there may be one
    behind each."""
    after = {}
    for kind, circuit in circuits.items():
        if circuit.rests:
            if begun < circuit.since:
                after[kind] = circuit
            elif circuit.successes + 1 < CLOSING:
                after[kind] = replace(circuit, successes=circuit.successes + 1)
        elif probed:
            after[kind] = circuit
        elif circuit.owed > 1:
            after[kind] = replace(circuit, failures=0, owed=circuit.owed - 1)
    return after


def phase_of(circuits: Circuits, now: float) -> CircuitPhase:
    """The worst of all kinds. Being busy is over when it is over: nobody has to find out whether it is."""
    phases = {circuit.phase(now) for kind, circuit in circuits.items()}
    if CircuitPhase.OPEN in phases:
        return CircuitPhase.OPEN
    halves = (kind for kind, circuit in circuits.items() if circuit.phase(now) is CircuitPhase.HALF_OPEN)
    return (
        CircuitPhase.HALF_OPEN if any(kind is not BreakerFailure.OVERLOADED for kind in halves) else CircuitPhase.CLOSED
    )


def rests_for(circuits: Circuits, now: float) -> tuple[BreakerFailure, Circuit] | None:
    """The kind of failure it rests for longest, or did before it became half open; None when all is closed."""
    opened = [(kind, circuit) for kind, circuit in circuits.items() if circuit.phase(now) is not CircuitPhase.CLOSED]
    if phase_of(circuits, now) is CircuitPhase.CLOSED:
        return None
    return max(opened, key=lambda one: one[1].until)


def rests_until(circuits: Circuits) -> float:
    """When it is half open again, in monotonic seconds; 0 when it is not resting."""
    return max((circuit.until for circuit in circuits.values() if circuit.rests), default=0.0)


def _is_due(circuit: Circuit, tolerance: BreakerConfig) -> bool:
    return circuit.owed > tolerance.allowed_fails * FORGIVING


def _blamed(circuit: Circuit, identity: str) -> str | None:
    return identity if identity and circuit.blamed in ("", identity) else None


def _failed_again(circuit: Circuit, identity: str, now: float, tolerance: BreakerConfig, jitter: float) -> Circuit:
    """A half-open circuit rests again, unless its probes can still tell that it is one identity that fails."""
    blamed = _blamed(circuit, identity)
    if blamed is None:
        return _rested(circuit, now, tolerance, jitter)
    return replace(circuit, successes=0, blamed=blamed)


def _rested(circuit: Circuit, now: float, tolerance: BreakerConfig, jitter: float) -> Circuit:
    longest = max(REST_AT_MOST_S, tolerance.cooldown_s)
    length = min(tolerance.cooldown_s * 2.0 ** min(circuit.rests, 32), longest)
    return Circuit(circuit.failures, circuit.owed, rests=circuit.rests + 1, since=now, until=now + length * jitter)


def _overloaded(
    circuit: Circuit, retry_after_s: float | None, now: float, tolerance: BreakerConfig, jitter: float
) -> Circuit:
    """It rests as long as it asks for, but no longer than a dead one would; when it asks for nothing, a breath that
    doubles while it stays so."""
    asked = BREATH_S * 2.0 ** min(circuit.rests, 32) if retry_after_s is None else max(retry_after_s, 0.0)
    until = now + min(asked, tolerance.cooldown_s) * (jitter if retry_after_s is None else 1.0)
    if circuit.phase(now) is CircuitPhase.OPEN:
        # Several requests were told at once.
        return replace(circuit, failures=circuit.failures + 1, until=max(until, circuit.until))
    return Circuit(circuit.failures + 1, rests=circuit.rests + 1, since=now, until=until)
