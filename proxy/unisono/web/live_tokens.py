"""Tokens of an answer in progress: for the page, and as comments in its own stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from unisono.api.request_headers import request_headers
from unisono.api.route_table import dependency
from unisono.api.sse import COMMENTS
from unisono.core.observer import LiveOutput, LiveOutputs
from unisono.engine.journal import parts_of
from unisono.errors import InvalidRequest
from unisono.harmony.encoding import load_encoding
from unisono.observe.recording import dumped
from unisono.web.recording_view import add_part
from unisono.web.segments import Segment, Segments

# Interval between two reads of the journal, in seconds.
INTERVAL_S: Final = 0.04
# Batches with more journal numbers are converted in a thread. This many take about a millisecond.
OFF_LOOP_NUMBERS: Final = 1_000
# Maximum time for which one client can watch an answer, in seconds.
MAX_WATCH_S: Final = 1_800.0


async def live_segments(output: LiveOutput) -> AsyncIterator[list[Segment]]:
    """Yield the segments of an answer as its journal grows, until it has ended."""
    segments, position = Segments(load_encoding()), 0
    for _ in range(int(MAX_WATCH_S / INTERVAL_S)):
        # The end is read before the journal, so that the last batch contains everything that was written before the
        # end.
        has_ended = output.is_ended
        new = output.journal[position:]
        position += len(new)
        if len(new) > OFF_LOOP_NUMBERS:
            await asyncio.to_thread(_add, segments, new)
        else:
            _add(segments, new)
        if batch := segments.pop_new() if has_ended else segments.pop_complete():
            yield batch
        if has_ended:
            return
        await asyncio.sleep(INTERVAL_S)


def _add(segments: Segments, journal: Sequence[int]) -> None:
    for part in parts_of(journal):
        add_part(segments, part)


# Header with which a streaming request asks for the tokens, and the header's only value.
TOKENS_HEADER: Final = "x-unisono-tokens"
IN_COMMENTS: Final = "comments"
# Name of the header in an ASGI scope.
_TOKENS_HEADER_BYTES: Final = TOKENS_HEADER.encode()


class TokenComments:
    """ASGI layer that adds an answer's tokens to its stream if the request asks for them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http" and (values := request_headers(scope).get(_TOKENS_HEADER_BYTES)):
            if values != [IN_COMMENTS]:
                raise InvalidRequest(
                    f"Invalid value for '{TOKENS_HEADER}': must be '{IN_COMMENTS}'", param=TOKENS_HEADER
                )
            scope["state"][COMMENTS] = partial(_comments, Request(scope))
        return self._app(scope, receive, send)


async def _comments(connection: Request) -> AsyncIterator[bytes]:
    caller = connection.state.caller
    live = dependency(connection, LiveOutputs)
    if (output := live.find(connection.state.request_id, caller.tenant, caller.key)) is not None:
        async for segments in live_segments(output):
            yield b": tokens " + dumped({"segments": segments}) + b"\n\n"
