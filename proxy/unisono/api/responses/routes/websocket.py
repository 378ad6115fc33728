"""WebSocket route of the Responses API: one connection for many responses."""

from __future__ import annotations

from starlette.websockets import WebSocket

from unisono.api.responses.outbound.dialects import Dialect
from unisono.api.responses.routes.responses_api import ResponsesApi
from unisono.api.responses.websocket.connection import Connection
from unisono.api.route_table import RouteTable, dependency


def add_websocket_routes(table: RouteTable, dialect: Dialect) -> None:
    async def connect(socket: WebSocket) -> None:
        await Connection(dependency(socket, ResponsesApi).deps, dialect, socket).run()

    table.add_websocket("/responses", connect)
