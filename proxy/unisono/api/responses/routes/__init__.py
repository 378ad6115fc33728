"""HTTP routes of the Responses API, under a separate path for each dialect."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter

from unisono.api.responses.background.runner import BackgroundRunner
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.outbound.dialects import OPEN_RESPONSES, OPENAI, Dialect
from unisono.api.responses.routes.compact import compact_routes
from unisono.api.responses.routes.create import create_routes
from unisono.api.responses.routes.input_tokens import counting_routes
from unisono.api.responses.routes.retrieve import stored_response_routes
from unisono.api.responses.routes.websocket import websocket_routes
from unisono.api.sse import KEEP_ALIVE_S

# Dialects by path prefix.
DIALECTS: Mapping[str, Dialect] = {
    "/v1": OPENAI,
    "": OPENAI,
    "/open-responses/v1": OPEN_RESPONSES,
    "/open-responses": OPEN_RESPONSES,
}


def responses_router(
    means: ResponsesDeps, runner: BackgroundRunner, *, keep_alive_s: float = KEEP_ALIVE_S
) -> APIRouter:
    """Return the router of the Responses API.

    The layers of `api.asgi_layers` must run first: they put the caller and the request id into the state.
    """
    router = APIRouter()
    for prefix, dialect in DIALECTS.items():
        path = f"{prefix}/responses"
        create_routes(router, path, means, runner, dialect, keep_alive_s)
        counting_routes(router, path, means, dialect)
        compact_routes(router, path, means, dialect)
        stored_response_routes(router, path, means, runner, dialect, keep_alive_s)
        websocket_routes(router, path, means, dialect)
    return router
