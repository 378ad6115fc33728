"""HTTP routes of the Responses API, in a separate table for each dialect."""

from __future__ import annotations

from unisono.api.responses.outbound.dialects import OPEN_RESPONSES, OPENAI, Dialect
from unisono.api.responses.routes.compact import add_compact_route
from unisono.api.responses.routes.create import add_create_route
from unisono.api.responses.routes.input_tokens import add_counting_route
from unisono.api.responses.routes.retrieve import add_stored_routes
from unisono.api.responses.routes.websocket import add_websocket_routes
from unisono.api.route_table import RouteTable


def _responses_table(table: RouteTable, dialect: Dialect) -> RouteTable:
    add_create_route(table, dialect)
    add_counting_route(table, dialect)
    add_compact_route(table, dialect)
    add_stored_routes(table, dialect)
    add_websocket_routes(table, dialect)
    return table


RESPONSES = _responses_table(RouteTable("responses"), OPENAI)
OPEN_RESPONSES_ROUTES = _responses_table(
    RouteTable("open responses", prefixes=("/open-responses/v1", "/open-responses"), suffix="InOpenResponses"),
    OPEN_RESPONSES,
)
