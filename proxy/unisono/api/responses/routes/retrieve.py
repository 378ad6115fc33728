"""Routes of stored responses: retrieve, stream, cancel, list items, delete."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from unisono.api.answer_types import Deleted
from unisono.api.dependencies import CurrentCaller, PathId, provided
from unisono.api.field_types import shortened
from unisono.api.json_response import to_whole
from unisono.api.responses import answer_schema
from unisono.api.responses.background.event_log import logged_events
from unisono.api.responses.background.runner import missing
from unisono.api.responses.continued_history import OUR_ID
from unisono.api.responses.items import to_listing
from unisono.api.responses.outbound.dialects import OPEN_RESPONSES, OPENAI, Dialect
from unisono.api.responses.routes.create import to_http_response
from unisono.api.responses.routes.responses_api import ResponsesApi, open_responses_table, responses_table, to_sse
from unisono.api.responses.schema import PageQuery, ResponseQuery
from unisono.api.route_table import READ_404, READ_404_409, RouteTable
from unisono.api.sse import EventStream
from unisono.core.state_store import StoredItem, StoredResponse
from unisono.errors import InvalidRequest, NotFound

Api = Annotated[ResponsesApi, provided(ResponsesApi)]


async def found(api: ResponsesApi, tenant: str, response_id: str) -> StoredResponse:
    """Return the tenant's stored response.

    Raises NotFound if the id is malformed, or if the response was deleted or has expired.
    """
    if not OUR_ID.fullmatch(response_id):
        raise missing(response_id)
    [response] = await api.deps.store.responses(tenant, [response_id])
    if response is None:
        raise missing(response_id)
    return response


# The routes serialize the stored form of a response directly. Pydantic models would validate all its items again.
def _stored_table(table: RouteTable, dialect: Dialect) -> RouteTable:
    path = "/responses/{response_id}"

    @table.add("GET", path, READ_404, answer=answer_schema.Response, events=answer_schema.ResponseEvent)
    async def get_response(
        api: Api, caller: CurrentCaller, response_id: PathId, query: Annotated[ResponseQuery, Query()]
    ) -> Response:
        """Retrieve a stored response or its events."""
        response = await found(api, caller.tenant, response_id)
        if not query.stream:
            return to_http_response(response, dialect)
        store = api.deps.store
        if await store.events(caller.tenant, response.id, 0, limit=1) is None:
            raise InvalidRequest(
                "The events of this response are not stored: the response was not created with 'background: true', or "
                "it ended too long ago. Retrieve the response without 'stream'.",
                param="stream",
            )
        events = logged_events(store, caller.tenant, response.id, dialect, starting_after=query.starting_after)
        return EventStream(to_sse(events), keep_alive_s=api.keep_alive_s)

    @table.add("DELETE", path, READ_404_409)
    async def delete_response(api: Api, caller: CurrentCaller, response_id: PathId) -> Deleted:
        """Delete a stored response."""
        response = await found(api, caller.tenant, response_id)
        if not await api.deps.store.delete_response(caller.tenant, response.id):
            raise missing(response.id)
        api.runner.forget(caller.tenant, response.id)
        return Deleted(id=response.id, object="response", deleted=True)

    @table.add("POST", f"{path}/cancel", READ_404_409, answer=answer_schema.Response)
    async def cancel_response(api: Api, caller: CurrentCaller, response_id: PathId) -> Response:
        """Cancel a background response."""
        response = await found(api, caller.tenant, response_id)
        return to_http_response(await api.runner.cancel(caller.tenant, response.id), dialect)

    @table.add("GET", f"{path}/input_items", READ_404, answer=answer_schema.ItemPage)
    async def list_input_items(
        api: Api, caller: CurrentCaller, response_id: PathId, query: Annotated[PageQuery, Query()]
    ) -> Response:
        """List the input items of a response."""
        response = await found(api, caller.tenant, response_id)
        page, more = paged(response.input, query)
        return to_whole(to_listing(page, has_more=more, show=dialect.item))

    return table


def paged(items: tuple[StoredItem, ...], query: PageQuery) -> tuple[tuple[StoredItem, ...], bool]:
    """Return one page of `items`, and True if more items follow the page.

    `items` are sorted from oldest to newest. Raises NotFound if no item has the id `query.after`.
    """
    ordered = items if query.order == "asc" else items[::-1]
    start = 0
    if query.after is not None:
        start = next((place + 1 for place, item in enumerate(ordered) if item.id == query.after), 0)
        if not start:
            raise NotFound(f"Item with id '{shortened(query.after)}' not found.", param="after")
    page = ordered[start : start + query.limit]
    return page, start + len(page) < len(ordered)


STORED_RESPONSES = _stored_table(responses_table(), OPENAI)
STORED_OPEN_RESPONSES = _stored_table(open_responses_table(), OPEN_RESPONSES)
