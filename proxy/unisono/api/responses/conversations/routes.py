"""Routes of `/v1/conversations` and its items, with and without `/v1`.

Every request makes at most one write, so that no request can be executed in part. Requests with an unknown id, a
deleted id or an id of another tenant get the same 404 error.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Depends, Query
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from unisono.api.answer_types import ABSENT, AnswerModel, Deleted, Moment, Object
from unisono.api.body import off_loop, read_json, work_size
from unisono.api.dependencies import CurrentCaller, ParsedBody, PathId, provided
from unisono.api.field_types import AtMost, FieldInput, OpenModel, shortened
from unisono.api.json_response import to_whole
from unisono.api.media_loading import MediaHistory, MediaSource, file_context
from unisono.api.media_replacement import HistoryFields
from unisono.api.responses.answer_schema import AddedItemPage, Item, ItemPage, StoredReport
from unisono.api.responses.deps import SealsSource
from unisono.api.responses.inbound import to_entries
from unisono.api.responses.input_conversion import InputConversion, KnownState, has_sealed, opener
from unisono.api.responses.input_items import (
    GivenItem,
    InputAddedTools,
    InputApprovalResponse,
    InputCallOutput,
    InputClientToolOutput,
    InputElicitationResponse,
    InputItem,
    InputMcpCall,
    InputSealed,
    InputSearchOutput,
)
from unisono.api.responses.items import NewId, meaning_of, to_listing
from unisono.api.responses.schema import ItemQuery, Metadata, PageQuery
from unisono.api.responses.server_tools.approval_history import server_tool_history
from unisono.api.responses.server_tools.deferred_tools import items_searcher
from unisono.api.route_table import BODY_404_409, READ_404, READ_404_409, RouteTable
from unisono.api.unused_fields import MAX_NOTES
from unisono.core.frozen import dataclass
from unisono.core.input_files import FileReader
from unisono.core.state_store import Store, StoredConversation, StoredItem
from unisono.errors import NotFound, StoreConflict

# Conversion of conversation requests to store operations.
#
# The conversion has no side effects: state and ids are arguments.

DEPENDENT_ITEMS = (
    *(InputCallOutput, InputClientToolOutput, InputSearchOutput),
    *(InputApprovalResponse, InputElicitationResponse, InputMcpCall, InputSealed, InputAddedTools),
)
_POSSIBLE = re.compile(r"[A-Za-z0-9_-]{1,128}")


def is_possible_id(name: str) -> bool:
    """Return True if `name` can be an id of this gateway."""
    return _POSSIBLE.fullmatch(name) is not None


def referenced_ids(items: Sequence[InputItem]) -> tuple[str, ...]:
    """Return the distinct ids in new items that may be ids of stored items."""
    return tuple(dict.fromkeys(item.id for item in items if item.id and is_possible_id(item.id)))


def depends_on_earlier(items: Sequence[InputItem]) -> bool:
    """Return True if an item needs earlier items; for example, a tool result needs its call."""
    return any(isinstance(item, DEPENDENT_ITEMS) for item in items)


def to_added(items: Sequence[InputItem], known: KnownState, new_id: NewId) -> tuple[tuple[StoredItem, ...], list[str]]:
    """Convert new items to stored items. Return the stored items, and notes for the client.

    Raises InvalidRequest for an output with a wrong call id among the calls and outputs at the end, and NotFound for a
    reference to a missing item. The error names the field.
    """
    reading = InputConversion(known, searcher=items_searcher(items, known.earlier))
    reading.add(known.earlier)
    return to_entries(items, reading, new_id, "items", has_stored_history=True), reading.notes


# Schemas of the request bodies of the Conversations API.

# Maximum number of items that one request may add.
MAX_NEW_ITEMS = 20


def _no_labels(value: Any) -> Any:
    return {} if value is None else value


def _no_items(value: Any) -> Any:
    return [] if value is None else value


NewItems = Annotated[list[GivenItem], AtMost(MAX_NEW_ITEMS)]


# Metadata of a conversation. Null is read as an empty object.
Labels = Annotated[Metadata, BeforeValidator(_no_labels), FieldInput(Metadata | None)]


class AddedItems(MediaHistory):
    """Request with items to store.

    Media in these items are replaced by a text and never rejected, because stored items are history.
    """

    FIELDS = HistoryFields("items")
    KEEPS_NEWEST = False

    items: NewItems


class NewConversation(AddedItems):
    items: Annotated[NewItems, BeforeValidator(_no_items), FieldInput(NewItems | None)] = Field(default_factory=list)
    metadata: Labels = Field(default_factory=dict)


class ChangedConversation(OpenModel):
    """An update of a conversation. `metadata` replaces all earlier metadata."""

    metadata: Labels


Added = TypeVar("Added", bound=AddedItems)

# Maximum number of attempts to append items while other requests append to the same conversation.
TRIES = 8
_ONE = "/conversations/{conversation}"
_ITEMS, _ITEM = f"{_ONE}/items", f"{_ONE}/items/{{item}}"

CONVERSATIONS = RouteTable("conversations")


@dataclass(frozen=True, slots=True)
class ConversationDeps:
    """Dependencies of the Conversations API.

    `today` returns the date as YYYY-MM-DD. A conversation stores the date of its creation, and its prompts state that
    date. `new_id` returns an unguessable id with the given prefix. `clock` returns the time in seconds since the epoch.
    `seals` returns the functions that encrypt and decrypt items. Their key may be in the store, so `seals` raises
    StoreUnavailable if the store fails.
    """

    store: Store
    today: Callable[[], str]
    new_id: NewId
    clock: Callable[[], float]
    seals: SealsSource
    files: FileReader | None = None


Deps = Annotated[ConversationDeps, provided(ConversationDeps)]


def _items_in(kind: type[Added]) -> Any:
    """Return a FastAPI dependency that parses a body with items and reads the items' files.

    The dependency raises the errors of `read_json`, FilesBusy, and pydantic's ValidationError.
    """

    async def parsed(request: Request, deps: Deps) -> Added:
        body = await read_json(request)
        size = work_size(await request.body())
        source = MediaSource(body, request.state.caller, kind, size=size, request=request)
        context = await file_context(source, deps.files)
        return await off_loop(lambda: kind.model_validate(body, context=context), size)

    return Depends(parsed)


class ConversationObject(AnswerModel):
    id: str
    object: Literal["conversation"]
    created_at: Moment
    metadata: Object


class CreatedConversation(ConversationObject):
    unisono: StoredReport = ABSENT


def to_report(addition: AddedItems, notes: Sequence[str]) -> dict[str, Any]:
    """Return the field `unisono` about new items; {} if there is nothing to report."""
    every = [*addition.media_notes, *notes][:MAX_NOTES]
    return {"unisono": {"recoveries": [*addition.recoveries], "notes": every}} if every else {}


def to_conversation(conversation: StoredConversation) -> ConversationObject:
    return ConversationObject(
        id=conversation.id,
        object="conversation",
        created_at=int(conversation.created_at),
        metadata=dict(conversation.metadata),
    )


@CONVERSATIONS.add(
    "POST",
    "/conversations",
    BODY_404_409,
    answer=CreatedConversation,
    body=NewConversation,
    links=[
        f"{name} conversation"
        for name in ("getConversation", "updateConversation", "deleteConversation", "addItems", "listItems")
    ],
)
async def create_conversation(
    deps: Deps, caller: CurrentCaller, new: Annotated[NewConversation, _items_in(NewConversation)]
) -> Response:
    """Create a conversation."""
    known = await load_known_state(deps, caller.tenant, new.items)
    items, notes = await asyncio.to_thread(to_added, new.items, known, deps.new_id)
    created = StoredConversation(deps.new_id("conv_"), deps.clock(), deps.today(), new.metadata)
    await deps.store.create_conversation(caller.tenant, created, items)
    return to_whole(to_conversation(created).model_dump() | to_report(new, notes))


@CONVERSATIONS.add("GET", _ONE, READ_404)
async def get_conversation(deps: Deps, caller: CurrentCaller, conversation: PathId) -> ConversationObject:
    """Retrieve a conversation."""
    return to_conversation(await head_of(deps.store, caller.tenant, conversation))


@CONVERSATIONS.add("POST", _ONE, BODY_404_409, body=ChangedConversation)
async def update_conversation(
    deps: Deps, caller: CurrentCaller, conversation: PathId, change: ParsedBody[ChangedConversation]
) -> ConversationObject:
    """Replace the metadata of a conversation."""
    check_conversation(conversation)
    changed = await deps.store.set_metadata(caller.tenant, conversation, change.metadata)
    if changed is None:
        raise no_conversation(conversation)
    return to_conversation(changed)


@CONVERSATIONS.add("DELETE", _ONE, READ_404_409)
async def delete_conversation(deps: Deps, caller: CurrentCaller, conversation: PathId) -> Deleted:
    """Delete a conversation."""
    check_conversation(conversation)
    if not await deps.store.delete_conversation(caller.tenant, conversation):
        raise no_conversation(conversation)
    return Deleted(id=conversation, object="conversation.deleted", deleted=True)


# The routes serialize stored items directly. Pydantic models would validate the items of a page again.
@CONVERSATIONS.add("POST", _ITEMS, BODY_404_409, answer=AddedItemPage, body=AddedItems)
async def add_items(
    deps: Deps,
    caller: CurrentCaller,
    conversation: PathId,
    query: Annotated[ItemQuery, Query()],
    addition: Annotated[AddedItems, _items_in(AddedItems)],
) -> Response:
    """Append items to a conversation."""
    entries, notes = await added(deps, caller.tenant, conversation, addition.items)
    return to_whole(to_listing(entries, has_more=False) | to_report(addition, notes))


@CONVERSATIONS.add("GET", _ITEMS, READ_404, answer=ItemPage)
async def list_items(
    deps: Deps, caller: CurrentCaller, conversation: PathId, query: Annotated[PageQuery, Query()]
) -> Response:
    """List the items of a conversation."""
    page = await page_of(deps.store, caller.tenant, conversation, query)
    return to_whole(to_listing(page[: query.limit], has_more=len(page) > query.limit))


@CONVERSATIONS.add("GET", _ITEM, READ_404, answer=Item)
async def get_item(
    deps: Deps, caller: CurrentCaller, conversation: PathId, item: PathId, query: Annotated[ItemQuery, Query()]
) -> Response:
    """Retrieve an item of a conversation."""
    check_item(item)
    # The error does not reveal if the item or the conversation is missing.
    found = (
        await deps.store.conversation_item(caller.tenant, conversation, item) if is_possible_id(conversation) else None
    )
    if found is None:
        raise no_item(item)
    return to_whole(found.wire)


@CONVERSATIONS.add("DELETE", _ITEM, READ_404_409)
async def delete_item(deps: Deps, caller: CurrentCaller, conversation: PathId, item: PathId) -> ConversationObject:
    """Delete an item and return the conversation."""
    # Read the conversation first, because no error may occur after the deletion.
    head = await head_of(deps.store, caller.tenant, conversation)
    check_item(item)
    if not await deps.store.delete_item(caller.tenant, head.id, item):
        raise no_item(item)
    return to_conversation(head)


async def added(
    deps: ConversationDeps, tenant: str, conversation: str, items: Sequence[InputItem]
) -> tuple[tuple[StoredItem, ...], list[str]]:
    """Append items to a conversation. Return the stored items, and notes for the client.

    If another request changes the conversation between the lookup of the calls that outputs refer to and the write,
    the lookup and the write are repeated a few times. Raises NotFound for a missing conversation or item,
    InvalidRequest for an invalid item, and StoreConflict if a response is in progress or if the conflicts persist.
    """
    store = deps.store
    bound = depends_on_earlier(items)
    for tries_left in reversed(range(TRIES)):
        head = await head_of(store, tenant, conversation)
        earlier = await store.conversation_items(tenant, head.id) if bound else ()
        if earlier is None:
            break
        known = await load_known_state(deps, tenant, items, earlier)
        entries, notes = await asyncio.to_thread(to_added, items, known, deps.new_id)
        try:
            await store.append(tenant, head.id, entries, revision=head.revision if bound else None)
        except NotFound:
            break
        except StoreConflict:
            if not tries_left or (await head_of(store, tenant, conversation)).revision == head.revision:
                raise
        else:
            return entries, notes
    raise no_conversation(conversation)


async def load_known_state(
    deps: ConversationDeps, tenant: str, items: Sequence[InputItem], earlier: Sequence[StoredItem] = ()
) -> KnownState:
    """Read the stored items that new items refer to, and the key for encrypted texts.

    The result also contains the content of `earlier`, the history before the new items.
    """
    ids = referenced_ids(items)
    stored = dict(zip(ids, await asyncio.gather(*(deps.store.item(tenant, name) for name in ids)), strict=True))
    opened = opener(await deps.seals() if has_sealed(items) else None, tenant)
    return KnownState(meaning_of(earlier), stored.get, opened, hosted=server_tool_history(earlier))


async def page_of(store: Store, tenant: str, conversation: str, query: PageQuery) -> tuple[StoredItem, ...]:
    """Return the items of the requested page, plus one more item if the page is not the last."""
    check_conversation(conversation)
    page = await store.conversation_items(
        tenant, conversation, after=query.after, limit=query.limit + 1, newest_first=query.order == "desc"
    )
    if page is not None:
        return page
    await head_of(store, tenant, conversation)
    raise no_item(query.after or "", param="after")


async def head_of(store: Store, tenant: str, conversation: str) -> StoredConversation:
    """Return a stored conversation. Raises NotFound if it does not exist."""
    check_conversation(conversation)
    head = await store.conversation(tenant, conversation)
    if head is None:
        raise no_conversation(conversation)
    return head


def check_conversation(conversation: str) -> None:
    """Raise NotFound if the id is malformed, so that no conversation can have it."""
    if not is_possible_id(conversation):
        raise no_conversation(conversation)


def check_item(item: str) -> None:
    """Raise NotFound if the id is malformed, so that no item can have it."""
    if not is_possible_id(item):
        raise no_item(item)


def no_conversation(name: str) -> NotFound:
    return NotFound(f"Conversation with id '{shortened(name)}' not found.", param="conversation")


def no_item(name: str, param: str = "item") -> NotFound:
    return NotFound(f"Item with id '{shortened(name)}' not found in this conversation.", param=param)
