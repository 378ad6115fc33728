"""Dependencies, event streams and empty route tables of the Responses API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from unisono.api.responses.background.runner import BackgroundRunner
from unisono.api.responses.deps import ResponsesDeps
from unisono.api.responses.outbound.response import LAST_EVENTS
from unisono.api.responses.outbound.serializer import WireEvent, sse_of
from unisono.api.route_table import RouteTable
from unisono.api.sse import DONE, KEEP_ALIVE_S, EventSource, EventWriter
from unisono.core.frozen import dataclass


@dataclass(frozen=True, slots=True)
class ResponsesApi:
    deps: ResponsesDeps
    runner: BackgroundRunner
    keep_alive_s: float = KEEP_ALIVE_S


def responses_table() -> RouteTable:
    """Return an empty table for routes of OpenAI's dialect."""
    return RouteTable("responses")


def open_responses_table() -> RouteTable:
    """Return an empty table for routes of Open Responses."""
    return RouteTable("open responses", prefixes=("/open-responses/v1", "/open-responses"), suffix="InOpenResponses")


def to_sse(
    events: AsyncGenerator[list[WireEvent]], connect: Callable[[EventWriter], None] = lambda _: None
) -> EventSource[list[WireEvent]]:
    """Return the source of the events as bytes.

    `[DONE]` follows the terminal event, whether the response has succeeded or failed. `[DONE]` also follows an empty
    batch, which means that the client already has the terminal event. Any other stream has no `[DONE]`. `connect`
    receives the writer of the stream before the events are read.
    """
    has_ended = False

    def write(batch: list[WireEvent]) -> bytes:
        nonlocal has_ended
        has_ended = not batch or batch[-1].type in LAST_EVENTS.values()
        return sse_of(batch)

    return EventSource(events, write, lambda: DONE if has_ended else b"", connect)
