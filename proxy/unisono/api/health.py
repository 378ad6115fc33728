"""Liveness and readiness of the gateway, at LiteLLM's paths, open without a key.

The responses name no model, no backend and no address, because the paths are open. They contain counts, error codes,
and generic descriptions of a backend's fault and its remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.requests import Request


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


def health_routes(readiness: Callable[[], Readiness]) -> APIRouter:
    """Return the routes `/health/liveliness`, `/health/liveness` and `/health/readiness`.

    They call no backend and return the known state at once.
    """
    router = APIRouter(include_in_schema=False)

    async def alive(_: Request) -> JSONResponse:
        return JSONResponse({"status": "alive"})

    async def ready(_: Request) -> JSONResponse:
        now = readiness()
        body = {
            "status": "ready" if now.ready else "not ready",
            "models": {"ready": sum(now.models.values()), "total": len(now.models)},
            "reasons": sorted(set(now.reasons)),
        }
        return JSONResponse(body, 200 if now.ready else 503)

    # Plain routes: the framework stores its own kind of route functions forever, with all that they reference.
    for path in ("/health/liveliness", "/health/liveness"):
        router.add_route(path, alive, methods=["GET", "HEAD"])
    router.add_route("/health/readiness", ready, methods=["GET", "HEAD"])
    return router
