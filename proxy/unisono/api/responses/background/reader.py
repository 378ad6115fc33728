"""Reader of a response's event log, independent of the process that generates the response."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence

import orjson

from unisono.api.responses.background.event_log import PATIENCE_S
from unisono.api.responses.outbound.dialects import OPENAI, Dialect
from unisono.api.responses.outbound.serializer import WireEvent
from unisono.api.responses.persistence import retry_while_down
from unisono.core.state_store import EventPage, Store
from unisono.errors import NotFound

# Maximum time that one read waits for more events, in seconds.
WAIT_S = 5.0
# Maximum number of events of one read.
PAGE = 256
# The first page is small, so that a reader gets its first events early.
FIRST_PAGE = 16
# Target size of one read in bytes. It is estimated from the size of earlier events, because a slow reader holds the
# whole result of a read in memory.
PAGE_BYTES = 64 * 1024


async def logged_events(
    store: Store, tenant: str, response_id: str, first: int, dialect: Dialect
) -> AsyncGenerator[list[WireEvent]]:
    """Yield every logged event from number `first` to the last one.

    Yields nothing if there is no log. Waits while the store does not answer. Raises NotFound when the response is
    deleted meanwhile.
    """
    has_sent_events = False
    limit = FIRST_PAGE

    async def read() -> EventPage | None:
        return await store.events(tenant, response_id, first, limit=limit, wait_s=WAIT_S)

    while True:
        page = await retry_while_down(read, PATIENCE_S)
        if page is None:
            if has_sent_events:
                raise NotFound("The response was deleted while its events were being read.", param="response_id")
            return
        if page.events:
            for chunk in slices(page.events):
                yield [to_event(data, number, dialect) for number, data in enumerate(chunk, first)]
                first += len(chunk)
            limit = max(1, min(PAGE, PAGE_BYTES * len(page.events) // sum(map(len, page.events))))
            has_sent_events = True
        if page.ended:
            return


def slices(events: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Split `events` into lists of at most `PAGE_BYTES`, or of one larger event."""
    chunk: list[bytes] = []
    size = 0
    for data in events:
        if chunk and size + len(data) > PAGE_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(data)
        size += len(data)
    yield chunk


def to_event(data: bytes, number: int, dialect: Dialect) -> WireEvent:
    """Convert a logged event. Logs are in OpenAI's dialect."""
    if dialect is OPENAI:
        # The type is the first member: `{"type":"response.created",...`.
        return WireEvent(number, data[9 : data.index(b'"', 9)].decode(), data)
    event = dialect.translated(orjson.loads(data))
    return WireEvent(number, event["type"], orjson.dumps(event))
