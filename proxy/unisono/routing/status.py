"""Status of a deployment: a snapshot for readiness, the startup screen and metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field

from unisono.core.deployments import DeploymentState, FidelityState, FidelityStatus
from unisono.core.frozen import dataclass
from unisono.core.probe import MEANINGS
from unisono.errors import BackendUnfit
from unisono.routing.circuit_breaker import BreakerFailure, CircuitPhase, rests_for, rests_until
from unisono.routing.deployment import LiveDeployment
from unisono.routing.quality import DeploymentQuality, quality_of


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """Snapshot of one deployment.

    `since_s` is the age of the state in seconds. `reason` is an error code, the kind of failure, or the failed checks
    with their remedies; it contains no address, and may be public. `cause` is for the operator: the message of the last
    failed probe, with the reason of a failed connection.

    `running` counts the gateway's requests on the deployment and `tokens` the tokens they may use. `waiting`
    counts the requests in the queue of its model. `foreign` counts the requests of other clients, as far as the server
    reports them. `circuits` holds the phases of all circuits that are not closed, by kind of failure.
    """

    model: str
    name: str
    state: DeploymentState
    reason: str = ""
    cause: str = ""
    since_s: float = 0.0
    running: int = 0
    waiting: int = 0
    tokens: int = 0
    foreign: int = 0
    # Remaining cooldown in seconds.
    rests_s: float = 0.0
    circuits: Mapping[str, str] = field(default_factory=dict)
    quality: DeploymentQuality = field(default_factory=DeploymentQuality)
    fidelity: FidelityStatus | None = None
    # Number of second (hedged) requests that the deployment got, and how many of them it answered first.
    hedges: int = 0
    hedges_won: int = 0


def status_of(model: str, live: LiveDeployment, waiting: int, now: float) -> DeploymentStatus:
    state, reason, since = _state(live, now)
    one = live.candidate
    phases = {kind.value: circuit.phase(now) for kind, circuit in live.circuits.items()}
    return DeploymentStatus(
        model=model,
        name=live.name,
        state=state,
        reason=reason,
        cause="" if live.failure is None else cause_of(live.failure),
        since_s=max(now - since, 0.0),
        running=one.running,
        waiting=waiting,
        tokens=one.tokens,
        foreign=one.foreign_requests,
        rests_s=max(rests_until(live.circuits) - now, 0.0),
        circuits={kind: phase.value for kind, phase in phases.items() if phase is not CircuitPhase.CLOSED},
        fidelity=live.fidelity,
        hedges=live.hedges,
        hedges_won=live.hedges_won,
        quality=quality_of(live.quality, is_weighted=live.is_weighted_by_quality),
    )


# Address in asyncio's message of a failed connection.
_CONNECT_FAILED = re.compile(r"\('([^']+)', (\d+)(?:, \d+, \d+)?\)")
# Maximum characters of a cause.
MAX_CAUSE_LENGTH = 300


def cause_of(error: BaseException) -> str:
    """Return the message of an error, followed by the message of its root cause."""
    root = error
    while (inner := root.__cause__) is not None:
        root = inner
    reason = "" if root is error else _CONNECT_FAILED.sub(r"\1:\2", str(root))
    if isinstance(root, ConnectionRefusedError):
        reason = re.sub(r"\[Errno \d+\] Connect call failed", "connection refused by", reason)
    return ": ".join(dict.fromkeys(filter(None, (str(error), reason))))[:MAX_CAUSE_LENGTH]


# Reasons for an open or half-open circuit.
FAILED: Mapping[BreakerFailure, str] = {
    BreakerFailure.UNREACHABLE: "was unreachable too often",
    BreakerFailure.TIMEOUT: "timed out too often",
    BreakerFailure.OVERLOADED: "reports that it is overloaded",
    BreakerFailure.PROTOCOL: "sent incomplete or invalid responses too often",
    BreakerFailure.ERROR: "failed too often",
}


def _state(live: LiveDeployment, now: float) -> tuple[DeploymentState, str, float]:
    """Return the state of a deployment for its status, with the reason and the start time."""
    if live.terms.is_drained:
        return DeploymentState.DRAINED, "", live.drained_since
    if live.terms.shadow_of and live.known is not None and live.failure is None:
        return DeploymentState.SHADOW, f"of {live.terms.shadow_of}", live.healthy_since
    if isinstance(live.failure, BackendUnfit) and live.examined is not None:
        found = [(finding.check, MEANINGS[finding.check]) for finding in live.examined.fatal]
        reason = " ".join(f"{check}: {meaning.problem} {meaning.remedy}" for check, meaning in found)
        return DeploymentState.UNFIT, reason, live.failing_since
    if (rest := rests_for(live.circuits, now)) is not None:
        kind, circuit = rest
        if circuit.phase(now) is CircuitPhase.OPEN:
            return DeploymentState.RESTING, FAILED[kind], circuit.since
        if live.failure is None:
            return DeploymentState.HALF_OPEN, FAILED[kind], circuit.until
    if live.failure is not None:
        return DeploymentState.FAILING, live.failure.code, live.failing_since
    if live.known is not None:
        if live.fidelity is not None and live.fidelity.state is FidelityState.QUARANTINED:
            return DeploymentState.QUARANTINED, f"differs from {live.fidelity.reference}", live.healthy_since
        return DeploymentState.READY, "", live.healthy_since
    return DeploymentState.UNKNOWN, "not probed yet", live.failing_since
