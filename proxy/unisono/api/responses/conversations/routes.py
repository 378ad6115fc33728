"""Routes of `/v1/conversations` and its items, with and without `/v1`.

Every request makes at most one write, so no request is left half done. Unknown ids, deleted ids and those of another
tenant return the same 404.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from unisono.api.body import off_loop, read_json
from unisono.api.field_types import OpenModel, shortened
from unisono.api.methods import Endpoint, add_path
from unisono.api.responses.conversations.inbound import leans_on_earlier, possible, referenced_ids, to_added
from unisono.api.responses.conversations.outbound import to_conversation, to_deleted
from unisono.api.responses.conversations.schema import (
    AddedItems,
    ChangedConversation,
    NewConversation,
)
from unisono.api.responses.input_conversion import KnownState
from unisono.api.responses.input_items import InputItem
from unisono.api.responses.items import NewId, meaning_of, to_listing
from unisono.api.responses.queries import ItemQuery, PageQuery, to_query
from unisono.api.responses.server_tools.approval_history import hosted_in
from unisono.api.whole import to_whole
from unisono.core.state_store import Store, StoredConversation, StoredItem
from unisono.errors import NotFound, StoreConflict

PREFIXES = ("/v1", "")
# Maximum attempts to append items after concurrent appends.
TRIES = 8

Body = TypeVar("Body", bound=OpenModel)


@dataclass(frozen=True, slots=True)
class ConversationRoutes:
    """Handlers of the Conversations API; see `conversations_router`."""

    store: Store
    today: Callable[[], str]
    new_id: NewId
    clock: Callable[[], float]

    async def create(self, request: Request) -> Response:
        asked = await read(request, NewConversation)
        known = await known_to(self.store, tenant_of(request), asked.items)
        items = await asyncio.to_thread(to_added, asked.items, known, self.new_id)
        made = StoredConversation(self.new_id("conv_"), self.clock(), self.today(), asked.metadata)
        await self.store.create_conversation(tenant_of(request), made, items)
        return to_whole(to_conversation(made))

    async def retrieve(self, request: Request) -> Response:
        return to_whole(to_conversation(await head_of(self.store, request)))

    async def change(self, request: Request) -> Response:
        asked = await read(request, ChangedConversation)
        conversation = conversation_of(request)
        changed = await self.store.set_metadata(tenant_of(request), conversation, asked.metadata)
        if changed is None:
            raise no_conversation(conversation)
        return to_whole(to_conversation(changed))

    async def delete(self, request: Request) -> Response:
        conversation = conversation_of(request)
        if not await self.store.delete_conversation(tenant_of(request), conversation):
            raise no_conversation(conversation)
        return to_whole(to_deleted(conversation))

    async def add_items(self, request: Request) -> Response:
        to_query(request.query_params, ItemQuery)
        asked = await read(request, AddedItems)
        return to_whole(to_listing(await added(self.store, request, asked.items, self.new_id), has_more=False))

    async def list_items(self, request: Request) -> Response:
        asked = to_query(request.query_params, PageQuery)
        page = await page_of(self.store, request, asked)
        return to_whole(to_listing(page[: asked.limit], has_more=len(page) > asked.limit))

    async def retrieve_item(self, request: Request) -> Response:
        to_query(request.query_params, ItemQuery)
        conversation, item = request.path_params["conversation"], item_of(request)
        # The error does not reveal if the item or the conversation is missing.
        found = (
            await self.store.conversation_item(tenant_of(request), conversation, item)
            if possible(conversation)
            else None
        )
        if found is None:
            raise no_item(item)
        return to_whole(found.wire)

    async def delete_item(self, request: Request) -> Response:
        # Read first: after the deletion nothing may fail.
        head, item = await head_of(self.store, request), item_of(request)
        if not await self.store.delete_item(tenant_of(request), head.id, item):
            raise no_item(item)
        return to_whole(to_conversation(head))


def conversations_router(
    *, store: Store, today: Callable[[], str], new_id: NewId, clock: Callable[[], float]
) -> APIRouter:
    """Return the router of the Conversations API.

    `today` returns YYYY-MM-DD, the first day of a new conversation. `new_id` returns an unguessable id with the
    given prefix, and `clock` seconds since the epoch. The layers of `api.asgi_layers` must run first: they put the
    caller into the state.
    """
    handlers = ConversationRoutes(store, today, new_id, clock)
    one = "/conversations/{conversation}"
    routes: tuple[tuple[str, str, Mapping[str, Endpoint]], ...] = (
        ("conversations", "/conversations", {"POST": handlers.create}),
        ("conversation", one, {"GET": handlers.retrieve, "POST": handlers.change, "DELETE": handlers.delete}),
        ("conversation_items", f"{one}/items", {"GET": handlers.list_items, "POST": handlers.add_items}),
        ("conversation_item", f"{one}/items/{{item}}", {"GET": handlers.retrieve_item, "DELETE": handlers.delete_item}),
    )
    router = APIRouter()
    for prefix in PREFIXES:
        for name, path, endpoints in routes:
            add_path(router, prefix + path, endpoints, name=name)
    return router


async def read(request: Request, kind: type[Body]) -> Body:
    """Parse the body as `kind`.

    Raises the errors of `read_json`, and pydantic's ValidationError.
    """
    body = await read_json(request)
    return await off_loop(lambda: kind.model_validate(body), len(await request.body()))


async def added(store: Store, request: Request, items: Sequence[InputItem], new_id: NewId) -> tuple[StoredItem, ...]:
    """Append items, and return them as stored.

    Outputs must find their calls, so no other item may be appended between the lookup and the write. On a conflict
    both are repeated a few times. Raises NotFound, InvalidRequest, and StoreConflict while a response is being
    written or if the conflicts persist.
    """
    tenant, conversation = tenant_of(request), conversation_of(request)
    bound = leans_on_earlier(items)
    for tries_left in reversed(range(TRIES)):
        head = await head_of(store, request)
        earlier = await store.conversation_items(tenant, head.id) if bound else ()
        if earlier is None:
            break
        known = await known_to(store, tenant, items, earlier)
        entries = await asyncio.to_thread(to_added, items, known, new_id)
        try:
            await store.append(tenant, head.id, entries, revision=head.revision if bound else None)
        except NotFound:
            break
        except StoreConflict:
            if not tries_left or (await head_of(store, request)).revision == head.revision:
                raise
        else:
            return entries
    raise no_conversation(conversation)


async def known_to(
    store: Store, tenant: str, items: Sequence[InputItem], earlier: Sequence[StoredItem] = ()
) -> KnownState:
    """Read the stored items that new items refer to; `earlier` is the history before them."""
    wanted = referenced_ids(items)
    kept = dict(zip(wanted, await asyncio.gather(*(store.item(tenant, name) for name in wanted)), strict=True))
    return KnownState(meaning_of(earlier), kept.get, hosted=hosted_in(earlier))


async def page_of(store: Store, request: Request, asked: PageQuery) -> tuple[StoredItem, ...]:
    """Return the requested items, and one more if more follow."""
    tenant, conversation = tenant_of(request), conversation_of(request)
    page = await store.conversation_items(
        tenant, conversation, after=asked.after, limit=asked.limit + 1, newest_first=asked.order == "desc"
    )
    if page is not None:
        return page
    await head_of(store, request)
    raise no_item(asked.after or "", param="after")


async def head_of(store: Store, request: Request) -> StoredConversation:
    """Return the conversation in the path. Raises NotFound."""
    conversation = conversation_of(request)
    head = await store.conversation(tenant_of(request), conversation)
    if head is None:
        raise no_conversation(conversation)
    return head


def tenant_of(request: Request) -> str:
    return str(request.state.caller.tenant)


def conversation_of(request: Request) -> str:
    """Return the conversation id in the path. Raises NotFound for an impossible id."""
    conversation: str = request.path_params["conversation"]
    if not possible(conversation):
        raise no_conversation(conversation)
    return conversation


def item_of(request: Request) -> str:
    """Return the item id in the path. Raises NotFound for an impossible id."""
    item: str = request.path_params["item"]
    if not possible(item):
        raise no_item(item)
    return item


def no_conversation(name: str) -> NotFound:
    return NotFound(f"Conversation with id '{shortened(name)}' not found.")


def no_item(name: str, param: str | None = None) -> NotFound:
    return NotFound(f"Item with id '{shortened(name)}' not found in this conversation.", param=param)
