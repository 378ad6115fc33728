"""HTTP stream of the events of a response, with `[DONE]` after its last event."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from unisono.api.responses.outbound.response import LAST_EVENTS
from unisono.api.responses.outbound.serializer import WireEvent, sse_of
from unisono.api.sse import DONE, EventSource, EventWriter


def to_sse(
    events: AsyncGenerator[list[WireEvent]], connect: Callable[[EventWriter], None] = lambda _: None
) -> EventSource[list[WireEvent]]:
    """Return the source of the events as bytes.

    `[DONE]` follows the terminal event, whether the response has succeeded or failed. A stream that ends without a
    terminal event has no `[DONE]`. `connect` receives the writer of the stream before the events are read.
    """
    last = ""

    def write(batch: list[WireEvent]) -> bytes:
        nonlocal last
        last = batch[-1].type
        return sse_of(batch)

    return EventSource(events, write, lambda: DONE if last in LAST_EVENTS.values() else b"", connect)
