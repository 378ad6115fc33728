"""State that a request continues, read from the store: history and referenced items."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import takewhile

from unisono.api.compaction_summary import replaces_history
from unisono.api.field_types import shortened
from unisono.api.responses.configuration_updates import UNCHANGED, Configuration, configuration_in
from unisono.api.responses.inbound import referenced_ids, references
from unisono.api.responses.items import meaning_of
from unisono.api.responses.schema import ResponsesRequest
from unisono.api.responses.server_tools.approval_history import NOTHING_HOSTED, ServerToolHistory, server_tool_history
from unisono.core.conversation import Item
from unisono.core.error_texts import PREVIOUS_RESPONSE_NOT_FOUND
from unisono.core.frozen import dataclass
from unisono.core.state_store import Store, StoredItem, StoredResponse
from unisono.errors import NotFound, PreviousResponseNotFound, StoreConflict

OUR_ID = re.compile(r"[a-z]+_[0-9a-f]{32}")
LOOKUPS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class PriorState:
    """Stored state that a request continues.

    `earlier` holds the history before the request. `ancestors` are the ids of the previous responses, oldest first.
    `first_day` is the date of the conversation's first response, or "" if the request continues nothing. `revision` is
    the revision of the conversation. `seen` is the number of items that were ever added to the conversation, including
    deleted items. `revision` and `seen` are None if the request names no conversation. `hosted` is the server tool
    history in the earlier items. If `earlier` already contains the request's own input, `now` is the server tool
    history of this input.
    """

    earlier: tuple[Item, ...] = ()
    stored_items: Mapping[str, StoredItem] | None = None
    ancestors: tuple[str, ...] = ()
    first_day: str = ""
    revision: int | None = None
    seen: int | None = None
    hosted: ServerToolHistory = NOTHING_HOSTED
    now: ServerToolHistory = NOTHING_HOSTED
    # Settings that are in force after the earlier items.
    configuration: Configuration = UNCHANGED

    def prompt_date(self, today: str) -> str:
        """Return the date for the prompt; `today` if the request continues no earlier response.

        All prompts of a conversation contain the date of its first response. A new date would change the beginning of
        the prompt, so that the backend's prefix cache would not match.
        """
        return self.first_day or today


# Function that reads the complete prior state of a tenant's request.
Recall = Callable[[Store, str, ResponsesRequest], Awaitable[PriorState]]


async def recall(store: Store, tenant: str, request: ResponsesRequest) -> PriorState:
    """Read the prior state of `request` from the store.

    Nothing is read for a request without references. Raises NotFound if a response or conversation is missing, and
    StoreConflict if the previous response is still in progress.
    """
    stored = await _stored_items(store, tenant, request)
    if request.previous_response_id is not None:
        return await _chain(store, tenant, request.previous_response_id, stored)
    if request.conversation is not None:
        return await _conversation(store, tenant, request.conversation.id, stored)
    return PriorState(stored_items=stored)


async def chain_of(store: Store, tenant: str, stored: StoredResponse) -> PriorState:
    """Return the prior state of the request that created `stored`."""
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
            f"The response '{parent.id}' is still in progress; repeat the request when it has ended.",
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
    # The first response of a chain may belong to a conversation. The history then begins with the items that the
    # conversation had before that response.
    before = await _conversation_before(store, tenant, chain[0]) if chain[0].conversation is not None else ()
    items, all_items = list(before), list(before)
    configuration = configuration_in([*before, *(item for response in chain for item in response.input)])
    for response in chain:
        # A compaction replaces everything before it.
        items = [*([] if is_compacted(response) else [*items, *response.input]), *response.output]
        # It keeps the calls that wait for the user, but not their approval requests and questions, so the server tool
        # history is read from all items.
        all_items += (*response.input, *response.output)
    return PriorState(
        continued((), items),
        stored,
        (*parent.ancestors, parent.id),
        parent.first_day,
        hosted=server_tool_history(all_items),
        configuration=configuration,
    )


def is_compacted(response: StoredResponse) -> bool:
    """Return True if the output of a response replaces the conversation before it."""
    return any(item.wire.get("type") == "compaction" for item in response.output)


def continued(earlier: Sequence[Item], items: Sequence[StoredItem]) -> tuple[Item, ...]:
    """Return the model's history in `earlier` and `items`, from the last compaction on."""
    for at in reversed(range(len(items))):
        if items[at].wire.get("type") == "compaction" and replaces_history(items[at].meaning):
            return meaning_of(items[at:])
    return (*earlier, *meaning_of(items))


async def _conversation_before(store: Store, tenant: str, response: StoredResponse) -> Sequence[StoredItem]:
    """Return the items that the conversation had before `response`, without items deleted since.

    Raises PreviousResponseNotFound if the conversation was deleted, unless it had no items before `response`.
    """
    assert response.conversation is not None
    items = await store.conversation_items(tenant, response.conversation, upto=response.seen)
    if items is None and response.seen != 0:
        raise PreviousResponseNotFound(
            f"The conversation of the response '{response.id}' was deleted or has expired.",
            param="previous_response_id",
        )
    # A response that an earlier version stored has no `seen`. Its history ends before the first of its own items. For a
    # newer response, `seen` is used instead, because the response's items may have been deleted.
    own = set() if response.seen is not None else {item.id for item in (*response.input, *response.output)}
    return tuple(takewhile(lambda item: item.id not in own, items or ()))


async def _conversation(
    store: Store, tenant: str, conversation_id: str, stored: Mapping[str, StoredItem]
) -> PriorState:
    head = await store.conversation(tenant, conversation_id)
    items = await store.conversation_items(tenant, conversation_id) if head is not None else None
    if head is None or items is None:
        raise no_conversation(conversation_id)
    hosted, configuration = server_tool_history(items), configuration_in(items)
    return PriorState(
        continued((), items), stored, (), head.first_day, head.revision, head.added, hosted, configuration=configuration
    )


def no_conversation(conversation_id: str) -> NotFound:
    return NotFound(f"Conversation with id '{shortened(conversation_id)}' not found.", param="conversation")


async def _stored_items(store: Store, tenant: str, request: ResponsesRequest) -> Mapping[str, StoredItem]:
    """Read the stored items whose ids are in the request; return them by id.

    With `store: false`, only the targets of item references are read, so that other requests work without the store.
    The exact tokens of other items are then available only from their `encrypted_content`.
    """
    wanted_ids = referenced_ids(request) if request.stored else references(request)
    own_ids = [item_id for item_id in wanted_ids if OUR_ID.fullmatch(item_id)]
    stored: dict[str, StoredItem] = {}
    for start in range(0, len(own_ids), LOOKUPS_AT_ONCE):
        ids = own_ids[start : start + LOOKUPS_AT_ONCE]
        found = await asyncio.gather(*(store.item(tenant, item_id) for item_id in ids))
        stored |= {item_id: item for item_id, item in zip(ids, found, strict=True) if item is not None}
    return stored
