"""States of deployments, their fidelity, and deployments as administrators see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Any

from unisono.core.frozen import dataclass
from unisono.core.probe import Finding


class FidelityState(StrEnum):
    """State of a deployment, which follows from its fidelity."""

    HEALTHY = "healthy"
    WARNING = "warning"  # a limit is exceeded, or a quarantine has ended; the next answers determine the next state
    QUARANTINED = "quarantined"  # not used while another deployment works


@dataclass(frozen=True, slots=True)
class FidelityStatus:
    """Fidelity of a deployment, measured with its last scored answers.

    `reference` is the deployment with which it is compared. `answers` and `tokens` are the numbers of scored answers
    and tokens. `agreement` is the share of tokens for which both deployments consider the same token most likely.
    `divergence` is the mean divergence of their distributions in nats. `implausible` is the share of tokens that the
    reference considers practically impossible. `agreement`, `divergence` and `implausible` are None if nothing was
    measured. `exceeded` are the names of the exceeded limits. A quarantine ends at `until`, in seconds of the monotonic
    clock. `quarantines` is the number of consecutive quarantines.
    """

    reference: str
    state: FidelityState = FidelityState.HEALTHY
    answers: int = 0
    tokens: int = 0
    agreement: float | None = None
    divergence: float | None = None
    implausible: float | None = None
    exceeded: tuple[str, ...] = ()
    until: float = 0.0
    quarantines: int = 0


class DeploymentState(StrEnum):
    """Reported state of a deployment."""

    READY = "ready"
    RESTING = "resting"  # its circuit breaker is open
    HALF_OPEN = "half-open"  # the cooldown is over, but too few requests or probes have succeeded since
    FAILING = "failing"  # the last probe failed
    UNFIT = "unfit"  # a probe has a fatal finding
    UNKNOWN = "unknown"  # not probed yet
    DRAINED = "drained"  # an operator has withdrawn it from use
    SHADOW = "shadow"  # it repeats requests of another deployment, and its answers are not used
    QUARANTINED = "quarantined"  # the probabilities of its tokens differ from those of the reference deployment


@dataclass(frozen=True, slots=True)
class ManagedDeployment:
    """One deployment with its settings, without secrets, and its state in this process.

    `state` is a `DeploymentState`, or `invalid` for a stored deployment that is not served. `error` is the reason why
    the deployment is not ready; empty if the deployment is ready or no reason is known. `checks` are the results of the
    last probe. `is_stored` is False for an entry of the configuration file. `running` is the number of requests in
    progress.
    """

    id: str
    model_name: str
    is_stored: bool
    state: str
    error: str = ""
    is_drained: bool = False
    running: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    checks: Sequence[Finding] = ()


def finding_fields(finding: Finding) -> dict[str, str]:
    """Return the result of a check as JSON data. `result` is one of ok, note, warning, fatal."""
    result = finding.weight.value if finding.weight else "ok"
    return {"check": finding.check.value, "result": result, "detail": finding.text, "remedy": finding.advises}
