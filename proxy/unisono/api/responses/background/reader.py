"""A response read from its log, by whoever asks and wherever it is made."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import orjson

from unisono.api.responses.background.log import PATIENCE_S
from unisono.api.responses.keeping import insisting
from unisono.api.responses.outbound.dialects import OPENAI, Dialect
from unisono.api.responses.outbound.events import WireEvent
from unisono.core.state import EventPage, Store
from unisono.errors import NotFound

WAIT_S = 5.0
"""How long one look at the log waits for more, in seconds."""
PAGE = 256


async def logged_events(
    store: Store, tenant: str, response_id: str, first: int, dialect: Dialect
) -> AsyncGenerator[list[WireEvent]]:
    """Every event from number `first` on, as it is logged, to the last one; nothing where there is no log (any more).
    Waits out a store that does not answer. Raises NotFound when the response is deleted meanwhile."""
    told = False

    async def read() -> EventPage | None:
        return await store.events(tenant, response_id, first, limit=PAGE, wait_s=WAIT_S)

    while True:
        page = await insisting(read, PATIENCE_S)
        if page is None:
            if told:
                raise NotFound("The response was deleted while its events were read.", param="response_id")
            return
        if page.events:
            yield [to_event(data, first + place, dialect) for place, data in enumerate(page.events)]
            first += len(page.events)
            told = True
        if page.ended:
            return


def to_event(data: bytes, number: int, dialect: Dialect) -> WireEvent:
    """A logged event; logs are in OpenAI's form."""
    if dialect is OPENAI:
        # The type stands first: `{"type":"response.created",...`.
        return WireEvent(number, data[9 : data.index(b'"', 9)].decode(), data)
    event = dialect.translated(orjson.loads(data))
    return WireEvent(number, event["type"], orjson.dumps(event))
