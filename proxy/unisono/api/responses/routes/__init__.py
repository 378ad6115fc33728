"""Routes of the Responses API that generate or count tokens; one route table per dialect.

The routes for stored responses are in `retrieve`, which imports FastAPI.
"""

from __future__ import annotations

from starlette.websockets import WebSocket

from unisono.api.responses.outbound.dialects import OPEN_RESPONSES, OPENAI, Dialect
from unisono.api.responses.routes.compact import add_compact_route
from unisono.api.responses.routes.create import add_create_route
from unisono.api.responses.routes.input_tokens import add_counting_route
from unisono.api.responses.routes.responses_api import ResponsesApi, open_responses_table, responses_table
from unisono.api.responses.websocket.connection import Connection
from unisono.api.route_table import RouteTable, dependency


def _responses_table(table: RouteTable, dialect: Dialect) -> RouteTable:
    add_create_route(table, dialect)
    add_counting_route(table, dialect)
    add_compact_route(table, dialect)
    _add_websocket_route(table, dialect)
    return table


def _add_websocket_route(table: RouteTable, dialect: Dialect) -> None:
    async def connect(socket: WebSocket) -> None:
        await Connection(dependency(socket, ResponsesApi).deps, dialect, socket).run()

    table.add_websocket("/responses", connect)


RESPONSES = _responses_table(responses_table(), OPENAI)
OPEN_RESPONSES_ROUTES = _responses_table(open_responses_table(), OPEN_RESPONSES)
