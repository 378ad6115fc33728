"""Content of `GET /v1/status`: models, deployments, and the activity of the last hour.

Part of the composition root. For a caller who sees everything, the response contains all models, with their deployments
and the activity of all callers. For another caller, it contains the models that the caller may use, and whether they
are ready.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from unisono import __version__
from unisono.config import Config, ModelRegistry, ServedModel
from unisono.core.access import Caller
from unisono.core.deployments import DeploymentState
from unisono.core.frozen import dataclass
from unisono.core.recovery_rules import RULES
from unisono.observe.recent_stats import RecentStats
from unisono.routing.pool import RoutingPool
from unisono.routing.status import DeploymentStatus


@dataclass(frozen=True, slots=True)
class Overview:
    """Function that returns the status report for a caller.

    `kinds` maps the names of deployments to their backend kinds. `workers` is the number of processes that share the
    work, including this process. `clock` returns a Unix timestamp.
    """

    config: Config
    catalogue: ModelRegistry
    pool: RoutingPool
    recent: RecentStats
    kinds: Mapping[str, str]
    workers: int
    clock: Callable[[], float]

    def __call__(self, caller: Caller) -> dict[str, Any]:
        whole = caller.sees_all
        of_model: dict[str, list[DeploymentStatus]] = defaultdict(list)
        for status in self.pool.status():
            of_model[status.model].append(status)
        overview = {
            "object": "status",
            "version": __version__,
            "at": self.clock(),
            "key": caller.key or None,
            "keyless": self.config.general_settings.master_key is None,
            "traces": self.config.unisono.traces.mode,
            "rules": dict(RULES),
            "models": [
                self._model(name, group, of_model[group.name], whole=whole)
                for name, group in self.catalogue.listed()
                if whole or caller.may_use_model(name, group.name, *group.access_groups)
            ],
        }
        return overview | self._operators() if whole else overview

    def _model(self, name: str, group: ServedModel, members: list[DeploymentStatus], *, whole: bool) -> dict[str, Any]:
        model = {
            "id": name,
            "model": group.name,
            "mode": group.mode,
            "context": self.pool.context(group.name),
            "ready": any(member.state == DeploymentState.READY for member in members),
        }
        if not whole:
            return model
        # An alias has no deployments of its own.
        deployments = [self._deployment(member) for member in members] if name == group.name else []
        return model | {"waiting": max((member.waiting for member in members), default=0), "deployments": deployments}

    def _deployment(self, status: DeploymentStatus) -> dict[str, Any]:
        fields = asdict(status)
        del fields["model"], fields["waiting"]
        if status.fidelity is not None:
            # Left out, because it is a time of this process's monotonic clock, which has no meaning for clients.
            del fields["fidelity"]["until"]
        worked = self.recent.worked().get((status.model, status.name))
        return {**fields, "kind": self.kinds.get(status.name, ""), "hour": None if worked is None else asdict(worked)}

    def _operators(self) -> dict[str, Any]:
        minutes = [
            {
                "at": minute.at,
                "answers": minute.answers,
                "failed": minute.failed,
                "generated": minute.generated,
                "recoveries": dict(minute.recoveries),
            }
            for minute in self.recent.minutes()
        ]
        return {"workers": self.workers, "minutes": minutes}


def deployment_health(pool: RoutingPool) -> list[dict[str, Any]]:
    """Return the state of every deployment, in the form of LiteLLM's `/health`."""
    return [
        {"model_group": status.model, "model_id": status.name, "state": status.state, "error": status.reason or None}
        for status in pool.status()
    ]
