"""Routes of stored responses: retrieve, stream, cancel, list items, delete."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from unisono.api.field_types import shortened
from unisono.api.methods import add_path
from unisono.api.responses.background.reader import logged_events
from unisono.api.responses.background.runner import BackgroundRunner, missing
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.items import to_listing
from unisono.api.responses.outbound.dialects import Dialect
from unisono.api.responses.prior_state import OUR_ID
from unisono.api.responses.queries import PageQuery, ResponseQuery, to_query
from unisono.api.responses.routes.create import to_http_response, to_sse
from unisono.api.sse import EventStream
from unisono.api.whole import to_whole
from unisono.core.state_store import Store, StoredItem, StoredResponse
from unisono.errors import InvalidRequest, NotFound


@dataclass(frozen=True, slots=True)
class StoredResponseRoutes:
    """Handlers of the routes that read, delete or cancel one stored response."""

    store: Store
    runner: BackgroundRunner
    dialect: Dialect
    keep_alive_s: float

    async def found(self, request: Request) -> StoredResponse:
        """Return the response in the path, if it is the caller's."""
        response_id = request.path_params["response_id"]
        if not OUR_ID.fullmatch(response_id):
            raise missing(response_id)
        [response] = await self.store.responses(request.state.caller.tenant, [response_id])
        if response is None:
            raise missing(response_id)
        return response

    async def fetch(self, request: Request) -> Response:
        query = to_query(request.query_params, ResponseQuery)
        response = await self.found(request)
        if not query.stream:
            return to_http_response(response, self.dialect)
        tenant = request.state.caller.tenant
        if await self.store.events(tenant, response.id, 0, limit=1) is None:
            raise InvalidRequest(
                "The events of this response are not stored: it is not a background response, or it ended too long "
                "ago. Retrieve it without 'stream'.",
                param="stream",
            )
        first = 0 if query.starting_after is None else query.starting_after + 1
        events = logged_events(self.store, tenant, response.id, first, self.dialect)
        return EventStream(to_sse(events), keep_alive_s=self.keep_alive_s)

    async def delete(self, request: Request) -> Response:
        response = await self.found(request)
        tenant = request.state.caller.tenant
        if not await self.store.delete_response(tenant, response.id):
            raise missing(response.id)
        self.runner.forget(tenant, response.id)
        return to_whole({"id": response.id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        response = await self.found(request)
        return to_http_response(await self.runner.cancel(request.state.caller.tenant, response.id), self.dialect)

    async def input_items(self, request: Request) -> Response:
        query = to_query(request.query_params, PageQuery)
        response = await self.found(request)
        page, more = paged(response.input, query)
        return to_whole(to_listing(page, has_more=more, show=self.dialect.item))


def stored_response_routes(
    router: APIRouter, path: str, means: ResponsesDeps, runner: BackgroundRunner, dialect: Dialect, keep_alive_s: float
) -> None:
    """Add the routes. `path` is the path of the responses."""
    handlers = StoredResponseRoutes(means.store, runner, dialect, keep_alive_s)
    one = f"{path}/{{response_id}}"
    add_path(router, one, {"GET": handlers.fetch, "DELETE": handlers.delete}, name="response")
    router.add_route(f"{one}/cancel", handlers.cancel, methods=["POST"], name="cancel_response")
    router.add_route(f"{one}/input_items", handlers.input_items, methods=["GET"], name="input_items")


def paged(items: tuple[StoredItem, ...], query: PageQuery) -> tuple[tuple[StoredItem, ...], bool]:
    """Return a page of `items` (oldest first), and True if more items follow.

    Raises NotFound for an `after` that is not among them.
    """
    ordered = items if query.order == "asc" else items[::-1]
    start = 0
    if query.after is not None:
        start = next((place + 1 for place, item in enumerate(ordered) if item.id == query.after), 0)
        if not start:
            raise NotFound(f"Item with id '{shortened(query.after)}' not found.", param="after")
    page = ordered[start : start + query.limit]
    return page, start + len(page) < len(ordered)
