"""Route `/health`: the state of every deployment, as the last probes and requests found it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import Query

from unisono.api.admin.administration import ADMIN, CurrentActor
from unisono.api.answer_types import AnswerModel, Count, Object
from unisono.api.dependencies import provided
from unisono.core.frozen import dataclass

READY = "ready"


@dataclass(frozen=True, slots=True)
class BackendHealth:
    """Source of the state of all deployments.

    `deployments` returns at once, without a call to a backend. Each entry has `model_group`, `model_id`, `state` and
    `error`.
    """

    deployments: Callable[[], Sequence[Object]]


class HealthReport(AnswerModel):
    healthy_endpoints: list[Object]
    unhealthy_endpoints: list[Object]
    healthy_count: Count
    unhealthy_count: Count


@ADMIN.add("GET", "/health")
async def get_backend_health(
    source: Annotated[BackendHealth, provided(BackendHealth)],
    actor: CurrentActor,
    model: Annotated[str | None, Query(description="Name of a model.")] = None,
    model_id: Annotated[str | None, Query(description="Id of a deployment.")] = None,
) -> HealthReport:
    """Return the healthy and the unhealthy deployments."""
    del actor  # only the check of its role is needed
    found = [
        each
        for each in source.deployments()
        if model in (None, each["model_group"]) and model_id in (None, each["model_id"])
    ]
    healthy = [each for each in found if each["state"] == READY]
    unhealthy = [each for each in found if each["state"] != READY]
    return HealthReport(
        healthy_endpoints=healthy,
        unhealthy_endpoints=unhealthy,
        healthy_count=len(healthy),
        unhealthy_count=len(unhealthy),
    )
