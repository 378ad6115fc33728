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

    `[DONE]` follows the terminal event, whether the response has succeeded or failed. A stream that ends without a
    terminal event has no `[DONE]`. `connect` receives the writer of the stream before the events are read.
    """
    last = ""

    def write(batch: list[WireEvent]) -> bytes:
        nonlocal last
        last = batch[-1].type
        return sse_of(batch)

    return EventSource(events, write, lambda: DONE if last in LAST_EVENTS.values() else b"", connect)
