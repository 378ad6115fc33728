"""Prior state of a request, read before generation: its history and referenced items."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence

from unisono.api.field_types import shortened
from unisono.api.responses.inbound import referenced_ids, references
from unisono.api.responses.items import meaning_of
from unisono.api.responses.known_state import UNCHANGED, Configuration, configuration_in
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.responses.server_tools.approval_history import NOTHING_HOSTED, ServerToolHistory, server_tool_history
from unisono.api.summary import replaces_history
from unisono.core.conversation import Item
from unisono.core.error_texts import PREVIOUS_RESPONSE_NOT_FOUND
from unisono.core.frozen import dataclass
from unisono.core.state_store import Store, StoredItem, StoredResponse
from unisono.errors import NotFound, PreviousResponseNotFound, StoreConflict

OUR_ID = re.compile(r"[a-z]+_[0-9a-f]{32}")
LOOKUPS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class PriorState:
    """State before a request.

    `first_day` is the conversation's date, or "" if nothing is continued. `revision` is that of the conversation, or
    None without one. `hosted` is the earlier history of server tools. `now` is that of an input which is already in
    `earlier`.
    """

    earlier: tuple[Item, ...] = ()
    stored_items: Mapping[str, StoredItem] | None = None
    ancestors: tuple[str, ...] = ()
    first_day: str = ""
    revision: int | None = None
    hosted: ServerToolHistory = NOTHING_HOSTED
    now: ServerToolHistory = NOTHING_HOSTED
    # Settings that earlier items changed.
    configuration: Configuration = UNCHANGED


# Read the complete prior state of a tenant's request.
Recall = Callable[[Store, str, ResponsesRequest], Awaitable[PriorState]]


async def recall(store: Store, tenant: str, request: ResponsesRequest) -> PriorState:
    """Read the prior state of `request`. A request without references reads nothing.

    Raises NotFound for a missing object, and StoreConflict for a response that is still running.
    """
    stored = await _stored_items(store, tenant, request)
    if request.previous_response_id is not None:
        return await _chain(store, tenant, request.previous_response_id, stored)
    if request.conversation is not None:
        return await _conversation(store, tenant, request.conversation.id, stored)
    return PriorState(stored_items=stored)


async def chain_of(store: Store, tenant: str, stored: StoredResponse) -> PriorState:
    """Return the prior state of a stored response, as `recall` found it originally."""
    if stored.conversation is not None:
        return await _conversation(store, tenant, stored.conversation, {})
    if stored.parent is None:
        return PriorState()
    return await _chain(store, tenant, stored.parent, {})


async def _chain(store: Store, tenant: str, parent_id: str, stored: Mapping[str, StoredItem]) -> PriorState:
    [parent] = await store.responses(tenant, [parent_id]) if OUR_ID.fullmatch(parent_id) else (None,)
    if parent is None:
        raise PreviousResponseNotFound(
            PREVIOUS_RESPONSE_NOT_FOUND.template.format(response_id=shortened(parent_id)),
            param="previous_response_id",
        )
    if not parent.status.terminal:
        raise StoreConflict(
            f"The response '{parent.id}' is still in progress; continue it after its end.",
            param="previous_response_id",
        )
    chain: list[StoredResponse] = []
    for ancestor in await store.responses(tenant, parent.ancestors):
        if ancestor is None:
            raise PreviousResponseNotFound(
                f"An earlier response in the chain of '{parent.id}' was deleted or has expired.",
                param="previous_response_id",
            )
        chain.append(ancestor)
    chain.append(parent)
    # A chain may start in a conversation: then it begins with the conversation's items at that time.
    before = await _conversation_before(store, tenant, chain[0]) if chain[0].conversation is not None else ()
    items = list(before)
    configuration = configuration_in([*before, *(item for response in chain for item in response.input)])
    for response in chain:
        # A compaction replaces everything before it.
        items = [*([] if is_compacted(response) else [*items, *response.input]), *response.output]
    return PriorState(
        continued((), items),
        stored,
        (*parent.ancestors, parent.id),
        parent.first_day,
        hosted=server_tool_history(items),
        configuration=configuration,
    )


def is_compacted(response: StoredResponse) -> bool:
    """Return True if the output of a response replaces the conversation before it."""
    return any(item.wire.get("type") == "compaction" for item in response.output)


def continued(earlier: Sequence[Item], items: Sequence[StoredItem]) -> tuple[Item, ...]:
    """Return the content of `earlier` and `items`, without what a compaction replaces."""
    for at in reversed(range(len(items))):
        if items[at].wire.get("type") == "compaction" and replaces_history(items[at].meaning):
            return meaning_of(items[at:])
    return (*earlier, *meaning_of(items))


async def _conversation_before(store: Store, tenant: str, response: StoredResponse) -> Sequence[StoredItem]:
    """Return a conversation's items before one of its responses. Empty if it was deleted."""
    assert response.conversation is not None
    items = await store.conversation_items(tenant, response.conversation)
    own = {item.id for item in (*response.input, *response.output)}
    before: list[StoredItem] = []
    for item in items or ():
        if item.id in own:
            break
        before.append(item)
    return before


async def _conversation(
    store: Store, tenant: str, conversation_id: str, stored: Mapping[str, StoredItem]
) -> PriorState:
    head = await store.conversation(tenant, conversation_id)
    items = await store.conversation_items(tenant, conversation_id) if head is not None else None
    if head is None or items is None:
        raise no_conversation(conversation_id)
    hosted, configuration = server_tool_history(items), configuration_in(items)
    return PriorState(
        continued((), items), stored, (), head.first_day, head.revision, hosted, configuration=configuration
    )


def no_conversation(conversation_id: str) -> NotFound:
    return NotFound(f"Conversation with id '{shortened(conversation_id)}' not found.", param="conversation")


async def _stored_items(store: Store, tenant: str, request: ResponsesRequest) -> Mapping[str, StoredItem]:
    """Return the stored items that the request names.

    With `store: false`, an item whose text is in the request is not read, so that the request needs no store. Then only
    the `encrypted_content` of the item has its exact tokens.
    """
    wanted_ids = referenced_ids(request) if request.stored else references(request)
    own_ids = [item_id for item_id in wanted_ids if OUR_ID.fullmatch(item_id)]
    stored: dict[str, StoredItem] = {}
    for start in range(0, len(own_ids), LOOKUPS_AT_ONCE):
        ids = own_ids[start : start + LOOKUPS_AT_ONCE]
        found = await asyncio.gather(*(store.item(tenant, item_id) for item_id in ids))
        stored |= {item_id: item for item_id, item in zip(ids, found, strict=True) if item is not None}
    return stored
