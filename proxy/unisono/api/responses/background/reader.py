"""A response read from its log, by whoever asks and wherever it is made."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence

import orjson

from unisono.api.responses.background.event_log import PATIENCE_S
from unisono.api.responses.outbound.dialects import OPENAI, Dialect
from unisono.api.responses.outbound.serializer import WireEvent
from unisono.api.responses.persistence import insisting
from unisono.core.state_store import EventPage, Store
from unisono.errors import NotFound

WAIT_S = 5.0
"""How long one look at the log waits for more, in seconds."""
PAGE = 256
"""Events of one look, at most."""
FIRST_PAGE = 16
PAGE_BYTES = 64 * 1024
"""What a look is meant to bring. How large events are is known from the ones before: a reader that is slow has all that
one look brought in hand."""


async def logged_events(
    store: Store, tenant: str, response_id: str, first: int, dialect: Dialect
) -> AsyncGenerator[list[WireEvent]]:
    """Every event from number `first` on, as it is logged, to the last one; nothing where there is no log (any more).
    Waits out a store that does not answer. Raises NotFound when the response is deleted meanwhile."""
    told = False
    limit = FIRST_PAGE

    async def read() -> EventPage | None:
        return await store.events(tenant, response_id, first, limit=limit, wait_s=WAIT_S)

    while True:
        page = await insisting(read, PATIENCE_S)
        if page is None:
            if told:
                raise NotFound("The response was deleted while its events were read.", param="response_id")
            return
        if page.events:
            for few in slices(page.events):
                yield [to_event(data, number, dialect) for number, data in enumerate(few, first)]
                first += len(few)
            limit = max(1, min(PAGE, PAGE_BYTES * len(page.events) // sum(map(len, page.events))))
            told = True
        if page.ended:
            return


def slices(events: Sequence[bytes]) -> Iterator[list[bytes]]:
    """`events` a few at a time: as many as one look is meant to bring, or a single one that is larger."""
    few: list[bytes] = []
    size = 0
    for data in events:
        if few and size + len(data) > PAGE_BYTES:
            yield few
            few, size = [], 0
        few.append(data)
        size += len(data)
    yield few


def to_event(data: bytes, number: int, dialect: Dialect) -> WireEvent:
    """A logged event; logs are in OpenAI's form."""
    if dialect is OPENAI:
        # The type stands first: `{"type":"response.created",...`.
        return WireEvent(number, data[9 : data.index(b'"', 9)].decode(), data)
    event = dialect.translated(orjson.loads(data))
    return WireEvent(number, event["type"], orjson.dumps(event))
