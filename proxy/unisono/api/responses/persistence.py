"""Keeping what came of a request, before anybody is told that it is there."""

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

PAUSES_S = (0.05, 0.2, 0.5)
"""Between tries of a write the store did not answer: the same write may be repeated, and is then done once."""

JOINS = frozenset({Status.COMPLETED, Status.INCOMPLETE})
"""What becomes part of a conversation: half an answer a client has seen, but none that failed or was called off."""


async def insisting(act: Callable[[], Awaitable[T]], pauses_s: tuple[float, ...] = PAUSES_S) -> T:
    """What `act` gives; it is tried again while the store does not answer. Raises StoreUnavailable after the last
    try."""
    for pause_s in pauses_s:
        try:
            return await act()
        except StoreUnavailable:
            await asyncio.sleep(pause_s)
    return await act()


def as_kept(asked: PreparedRequest, response: StoredResponse) -> StoredResponse:
    """The response with its input, which no frame needs."""
    return replace(response, input=asked.turn.input)


def revision_for(asked: PreparedRequest, response: StoredResponse) -> int | None:
    """The conversation's revision to append behind; None where nothing is appended."""
    return asked.revision if response.status in JOINS else None


async def keep(means: ResponsesDeps, asked: PreparedRequest, response: StoredResponse) -> None:
    """Keep a finished response, and append it to its conversation, in one act. Does nothing for one that is not to be
    kept. Raises the StoreError family."""
    if not asked.request.stored and asked.lease is None:
        return

    async def create() -> None:
        await means.store.create(
            asked.sender.tenant,
            as_kept(asked, response),
            lease=asked.lease,
            revision=revision_for(asked, response),
        )

    async def append() -> None:
        # Not kept itself, but part of the conversation it was asked in.
        items = (*asked.turn.input, *response.output)
        assert asked.lease is not None
        await means.store.append(
            asked.sender.tenant, asked.lease.anchor, items, revision=asked.revision, lease=asked.lease
        )

    if asked.request.stored:
        await insisting(create)
    elif response.status in JOINS:
        await insisting(append)
