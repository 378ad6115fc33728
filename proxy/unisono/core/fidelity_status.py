"""Fidelity of a deployment: whether its model still computes what the reference computes."""

from __future__ import annotations

from enum import StrEnum

from unisono.core.frozen import dataclass


class FidelityState(StrEnum):
    """State of a deployment by its fidelity."""

    HEALTHY = "healthy"
    WARNING = "warning"  # beyond a limit, or on trial after a quarantine; the next answers decide
    QUARANTINED = "quarantined"  # not used while another deployment works


@dataclass(frozen=True, slots=True)
class FidelityStatus:
    """Fidelity of a deployment, from its last scored answers.

    `agreement` is the share of tokens where reference and deployment prefer the same one, `divergence` the mean
    divergence of their distributions in nats, and `implausible` the share of tokens that the reference considers
    practically impossible. None if nothing was measured. `exceeded` names the limits that are exceeded. A quarantine
    ends at `until`, in monotonic seconds; `quarantines` counts those in a row.
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
