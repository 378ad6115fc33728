"""Whether the gateway lives and whether it can answer: LiteLLM's paths, open without a key.

Because they are open they name nothing: no model, no backend, no address. They give counts, error codes, and what is
wrong with a backend and what to do about it in words that would fit any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.requests import Request


@dataclass(frozen=True, slots=True)
class Readiness:
    """`models` tells of each model whether a backend of it works; `reasons` are codes or sentences about those that do
    not."""

    models: Mapping[str, bool]
    reasons: Sequence[str] = ()

    @property
    def ready(self) -> bool:
        """One working model is enough: taking the whole gateway out for a broken one would break the others too."""
        return any(self.models.values())


def health_routes(readiness: Callable[[], Readiness]) -> APIRouter:
    """`/health/liveliness`, `/health/liveness` and `/health/readiness`. None of them asks a backend: they tell what
    is known, at once."""
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

    # As plain routes: the framework remembers the functions of its own kind for ever, and with them all that they know.
    for path in ("/health/liveliness", "/health/liveness"):
        router.add_route(path, alive, methods=["GET", "HEAD"])
    router.add_route("/health/readiness", ready, methods=["GET", "HEAD"])
    return router
