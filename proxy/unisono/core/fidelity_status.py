"""Fidelity of a deployment: whether its model still gives the same results as a reference."""

from __future__ import annotations

from enum import StrEnum

from unisono.core.frozen import dataclass


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
