"""What is told of a deployment: one snapshot for readiness, the start-up screen, and whoever counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from unisono.core.probe import MEANINGS
from unisono.errors import BackendUnfit
from unisono.routing.circuit_breaker import BreakerFailure, CircuitPhase, rests_for, rests_until
from unisono.routing.deployment import LiveDeployment


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """`state` is `ready`, `resting`, `half-open` (a rest is over, and it has not shown yet that it is well), `failing`
    (its last probe did), `unfit` (a fatal finding) or `unknown` (not probed yet), and `since_s` for how many seconds it
    has been so; `reason` is an error code, what it failed in, or the checks that failed with what to do about them, in
    words that tell nothing about this backend.

    `running` are the gateway's requests on it and `tokens` what they may take up there; `waiting` are those in line for
    its model. `foreign` are requests of others that the server says it has. `circuits` are those that are not closed,
    by kind of failure."""

    model: str
    name: str
    state: str
    reason: str = ""
    since_s: float = 0.0
    running: int = 0
    waiting: int = 0
    tokens: int = 0
    foreign: int = 0
    rests_s: float = 0.0
    """How long it will rest, in seconds."""
    circuits: Mapping[str, str] = field(default_factory=dict)


def status_of(model: str, live: LiveDeployment, waiting: int, now: float) -> DeploymentStatus:
    state, reason, since = _state(live, now)
    one = live.candidate
    phases = {kind.value: circuit.phase(now) for kind, circuit in live.circuits.items()}
    return DeploymentStatus(
        model=model,
        name=live.name,
        state=state,
        reason=reason,
        since_s=max(now - since, 0.0),
        running=one.running,
        waiting=waiting,
        tokens=one.tokens,
        foreign=one.foreign_requests,
        rests_s=max(rests_until(live.circuits) - now, 0.0),
        circuits={kind: phase.value for kind, phase in phases.items() if phase is not CircuitPhase.CLOSED},
    )


FAILED: Mapping[BreakerFailure, str] = {
    BreakerFailure.UNREACHABLE: "could not be reached too often",
    BreakerFailure.TIMEOUT: "was silent for too long too often",
    BreakerFailure.OVERLOADED: "says that it is overloaded",
    BreakerFailure.PROTOCOL: "broke off or sent garbage too often",
    BreakerFailure.ERROR: "failed too often",
}
"""Why a deployment rests, or did."""


def _state(live: LiveDeployment, now: float) -> tuple[str, str, float]:
    """The state, why, and since when."""
    if isinstance(live.failure, BackendUnfit) and live.examined is not None:
        found = [(finding.check, MEANINGS[finding.check]) for finding in live.examined.fatal]
        reason = " ".join(f"{check}: {meaning.problem} {meaning.remedy}" for check, meaning in found)
        return "unfit", reason, live.failing_since
    if (rest := rests_for(live.circuits, now)) is not None:
        kind, circuit = rest
        if circuit.phase(now) is CircuitPhase.OPEN:
            return "resting", FAILED[kind], circuit.since
        if live.failure is None:
            return "half-open", FAILED[kind], circuit.until
    if live.failure is not None:
        return "failing", live.failure.code, live.failing_since
    if live.known is not None:
        return "ready", "", live.well_since
    return "unknown", "not probed yet", live.failing_since
