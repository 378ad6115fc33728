"""Storage of finished responses, before the client receives the last event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.items import to_stored_output
from unisono.api.responses.prepared_request import PreparedRequest
from unisono.core.state_store import Status, StoredResponse
from unisono.errors import StoreUnavailable

T = TypeVar("T")

# Pauses in seconds between write attempts while the store does not answer. A repeated write takes effect once.
PAUSES_S = (0.05, 0.2, 0.5)

# Responses with these statuses are appended to their conversation. A partial answer is appended, because the client has
# received it; failed and cancelled responses are not.
JOINS = frozenset({Status.COMPLETED, Status.INCOMPLETE})


async def retry_while_down(act: Callable[[], Awaitable[T]], pauses_s: tuple[float, ...] = PAUSES_S) -> T:
    """Call `act`, and repeat the call after each of the pauses while the store is unavailable.

    Raises StoreUnavailable if the last attempt fails.
    """
    for pause_s in pauses_s:
        try:
            return await act()
        except StoreUnavailable:
            await asyncio.sleep(pause_s)
    return await act()


def to_stored(prepared: PreparedRequest, response: StoredResponse) -> StoredResponse:
    """Return the record to store: the response together with the request's input.

    An item with more than `MAX_STORED_LOGPROBS` log probabilities is stored without them.
    """
    return replace(response, input=prepared.generation.input, output=to_stored_output(response.output))


def revision_for(prepared: PreparedRequest, response: StoredResponse) -> int | None:
    """Return the conversation's revision for appending; None if the response is not appended."""
    return prepared.revision if response.status in JOINS else None


async def store_response(deps: ResponsesDeps, prepared: PreparedRequest, response: StoredResponse) -> None:
    """Store a finished response and append it to its conversation, in one transaction.

    Does nothing if the request has `store: false` and no conversation. Raises StoreError if the write fails.
    """
    if not prepared.request.stored and prepared.lease is None:
        return
    stored = to_stored(prepared, response)

    async def create() -> None:
        await deps.store.create(
            prepared.sender.tenant,
            stored,
            lease=prepared.lease,
            revision=revision_for(prepared, response),
        )

    async def append() -> None:
        # With `store: false`, only the items are stored, in the conversation.
        items = (*stored.input, *stored.output)
        assert prepared.lease is not None
        await deps.store.append(
            prepared.sender.tenant, prepared.lease.anchor, items, revision=prepared.revision, lease=prepared.lease
        )

    # Creation appends to the conversation in the same transaction, so both happen or neither does.
    if prepared.request.stored:
        await retry_while_down(create)
    elif response.status in JOINS:
        await retry_while_down(append)
