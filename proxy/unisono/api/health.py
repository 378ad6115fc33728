"""Liveness and readiness of the gateway, open without a key, and its version.

The paths are LiteLLM's, and `/ping` and `/version` those of vLLM.
Open responses name no model, no backend and no address. They contain counts, error codes, and generic descriptions of
a backend's fault and its remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from starlette.responses import Response

from unisono import __version__
from unisono.api.answer_types import AnswerModel, Count
from unisono.api.route_table import RouteTable, header_refs, provided
from unisono.core.frozen import dataclass

HEALTH = RouteTable("gateway", prefixes=("",))


@dataclass(frozen=True, slots=True)
class Readiness:
    """State of the models.

    `models` is True for each model with a working backend. `reasons` holds error codes or sentences about the
    others.
    """

    models: Mapping[str, bool]
    reasons: Sequence[str] = ()

    @property
    def ready(self) -> bool:
        """True if one model works.

        Removing the whole gateway for one broken model would disable the others too.
        """
        return any(self.models.values())


@dataclass(frozen=True, slots=True)
class ReadinessCheck:
    """Source of the state, which is known at once: it calls no backend."""

    readiness: Callable[[], Readiness]


class Alive(AnswerModel):
    status: Literal["alive"]


class GatewayVersion(AnswerModel):
    version: str


class ModelCounts(AnswerModel):
    ready: Count
    total: Count


class ReadinessReport(AnswerModel):
    status: Literal["ready", "not ready"]
    models: ModelCounts
    reasons: list[str]


UNREADY: dict[int | str, dict[str, Any]] = {
    503: {"model": ReadinessReport, "description": "No model is ready.", "headers": header_refs(["x-request-id"])}
}


@HEALTH.add("GET", "/health/liveliness", (400,), needs_key=False)
async def get_liveliness() -> Alive:
    """Check that the gateway is running."""
    return Alive(status="alive")


@HEALTH.add("GET", "/health/liveness", (400,), needs_key=False)
async def get_liveness() -> Alive:
    """Check that the gateway is running."""
    return Alive(status="alive")


@HEALTH.add("GET", "/health/readiness", (400,), needs_key=False, responses=UNREADY)
async def get_readiness(
    check: Annotated[ReadinessCheck, provided(ReadinessCheck)], response: Response
) -> ReadinessReport:
    """Check that at least one model can answer."""
    now = check.readiness()
    response.status_code = 200 if now.ready else 503
    return ReadinessReport(
        status="ready" if now.ready else "not ready",
        models=ModelCounts(ready=sum(now.models.values()), total=len(now.models)),
        reasons=sorted(set(now.reasons)),
    )


@HEALTH.add("GET", "/ping", (400,), needs_key=False)
async def ping() -> Alive:
    """Check that the gateway is running."""
    return Alive(status="alive")


@HEALTH.add("GET", "/version")
async def get_version() -> GatewayVersion:
    """Return the version of the gateway."""
    return GatewayVersion(version=__version__)
