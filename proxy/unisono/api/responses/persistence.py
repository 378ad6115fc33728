"""Storage of finished responses, before the client receives the last event."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.prepared_request import PreparedRequest
from unisono.core.state_store import Status, StoredResponse
from unisono.errors import StoreUnavailable

T = TypeVar("T")

# Pauses in seconds between write attempts while the store does not answer. A repeated write takes effect once.
PAUSES_S = (0.05, 0.2, 0.5)

# Statuses of responses that join a conversation. A partial answer that the client has received joins; a failed or
# cancelled one does not.
JOINS = frozenset({Status.COMPLETED, Status.INCOMPLETE})


async def insisting(act: Callable[[], Awaitable[T]], pauses_s: tuple[float, ...] = PAUSES_S) -> T:
    """Call `act` again while the store does not answer.

    Raises StoreUnavailable after the last attempt.
    """
    for pause_s in pauses_s:
        try:
            return await act()
        except StoreUnavailable:
            await asyncio.sleep(pause_s)
    return await act()


def to_stored(asked: PreparedRequest, response: StoredResponse) -> StoredResponse:
    """Return the record to store: the response together with the request's input."""
    return replace(response, input=asked.generation.input)


def revision_for(asked: PreparedRequest, response: StoredResponse) -> int | None:
    """Return the conversation's revision to append to, or None without an append."""
    return asked.revision if response.status in JOINS else None


async def keep(means: ResponsesDeps, asked: PreparedRequest, response: StoredResponse) -> None:
    """Store a finished response and append it to its conversation, in one transaction.

    Does nothing if neither is required. Raises the StoreError family.
    """
    if not asked.request.stored and asked.lease is None:
        return

    async def create() -> None:
        await means.store.create(
            asked.sender.tenant,
            to_stored(asked, response),
            lease=asked.lease,
            revision=revision_for(asked, response),
        )

    async def append() -> None:
        # The response is not stored, but belongs to its conversation.
        items = (*asked.generation.input, *response.output)
        assert asked.lease is not None
        await means.store.append(
            asked.sender.tenant, asked.lease.anchor, items, revision=asked.revision, lease=asked.lease
        )

    if asked.request.stored:
        await insisting(create)
    elif response.status in JOINS:
        await insisting(append)
