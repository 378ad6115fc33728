"""WebSocket route of the Responses API: one connection for many responses."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.websockets import WebSocket

from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.outbound.dialects import Dialect
from unisono.api.responses.websocket.connection import Connection


def websocket_routes(router: APIRouter, path: str, means: ResponsesDeps, dialect: Dialect) -> None:
    """Add the route. `path` is the path of the responses."""

    async def connect(socket: WebSocket) -> None:
        await Connection(means, dialect, socket).run()

    router.add_websocket_route(path, connect, name="responses_socket")
