"""Deployments of models as administrators see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from unisono.core.frozen import dataclass
from unisono.core.probe import Finding


@dataclass(frozen=True, slots=True)
class ManagedDeployment:
    """One deployment with its settings, without secrets, and its state in this process.

    `state` is a state of `routing.status`, or `invalid` for a stored deployment that is not served. `error` is the
    reason why the deployment is not ready; empty if it is ready or no reason is known. `checks` are the results of the
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
