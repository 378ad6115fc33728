"""Routes for the gateway's version, and for its liveness and readiness, which need no key.

`/ping` and `/version` are paths of vLLM, the other paths are LiteLLM's. A response to a request without a key contains
no name of a model or backend, and no address. It contains counts, error codes, and generic descriptions of faults and
their remedies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from unisono import __version__
from unisono.api.answer_types import AnswerModel, Count
from unisono.api.json_response import to_whole
from unisono.api.route_table import RouteTable, dependency, header_refs
from unisono.core.frozen import dataclass

HEALTH = RouteTable("gateway", prefixes=("",))


@dataclass(frozen=True, slots=True)
class Readiness:
    """State of the models.

    `models` is True for each model with a working backend. `reasons` holds error codes or sentences about the models
    without a working backend.
    """

    models: Mapping[str, bool]
    reasons: Sequence[str] = ()

    @property
    def ready(self) -> bool:
        """True if at least one model works.

        If one failed model made the whole gateway unready, a load balancer would cut off the working models too.
        """
        return any(self.models.values())


@dataclass(frozen=True, slots=True)
class ReadinessCheck:
    """Source of the readiness. `readiness` returns at once, without a call to a backend."""

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


ALIVE = {"status": "alive"}
UNREADY: dict[int | str, dict[str, Any]] = {
    503: {"model": ReadinessReport, "description": "No model is ready.", "headers": header_refs(["x-request-id"])}
}


@HEALTH.add("GET", "/health/liveliness", (400,), answer=Alive, needs_key=False, direct=True)
async def get_liveliness(request: Request) -> Response:
    """Check that the gateway is running."""
    return to_whole(ALIVE)


@HEALTH.add("GET", "/health/liveness", (400,), answer=Alive, needs_key=False, direct=True)
async def get_liveness(request: Request) -> Response:
    """Check that the gateway is running."""
    return to_whole(ALIVE)


@HEALTH.add("GET", "/health/readiness", (400,), answer=ReadinessReport, needs_key=False, responses=UNREADY, direct=True)
async def get_readiness(request: Request) -> Response:
    """Check that at least one model can answer."""
    now = dependency(request, ReadinessCheck).readiness()
    report = {
        "status": "ready" if now.ready else "not ready",
        "models": {"ready": sum(now.models.values()), "total": len(now.models)},
        "reasons": sorted(set(now.reasons)),
    }
    return to_whole(report, status=200 if now.ready else 503)


@HEALTH.add("GET", "/ping", (400,), answer=Alive, needs_key=False, direct=True)
async def ping(request: Request) -> Response:
    """Check that the gateway is running."""
    return to_whole(ALIVE)


@HEALTH.add("GET", "/version", answer=GatewayVersion, direct=True)
async def get_version(request: Request) -> Response:
    """Return the version of the gateway."""
    return to_whole({"version": __version__})
