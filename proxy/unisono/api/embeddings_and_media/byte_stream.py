"""Answers whose media type the backend selects, such as audio, forwarded as they arrive."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from unisono.api.answer_report import backend_header
from unisono.api.disconnects import until_disconnect
from unisono.api.error_responses import ClientGone, outcome
from unisono.core.events import Event, PassedBytes
from unisono.engine.request import GenerationStream

# Media types that a browser does not execute. Any other type is replaced, because executed content would have the same
# origin as the gateway's web page.
SAFE_TYPES: Final = (
    "audio/",
    "text/plain",
    "text/event-stream",
    "text/vtt",
    "application/json",
    "application/x-subrip",
)
MAX_WHOLE_BYTES: Final = 8 << 20
OTHER_TYPE: Final = "application/octet-stream"


def _nothing() -> None:
    """Do nothing: there is no file to close."""


async def started_bytes(
    request: Request, stream: GenerationStream, close: Callable[[], None] = _nothing, *, whole: bool = False
) -> Response:
    """Wait for the first bytes of an answer, and return the response.

    If `whole` is True, waits until all bytes or more than `MAX_WHOLE_BYTES` bytes have arrived, so that a hook can
    still reject the answer. `close` is called at the end of the response. Raises the error of the generation if it
    fails before the response starts.
    """
    try:
        batches = aiter(stream)
        first = await until_disconnect(request, _first(batches, MAX_WHOLE_BYTES if whole else 0))
    except BaseException:
        await stream.aclose()
        raise
    return ByteStream(stream, first, batches, close)


async def _first(batches: AsyncIterator[list[Event]], size: int) -> list[PassedBytes]:
    """Read batches until they have over `size` bytes or the stream ends; return their parts."""
    first: list[PassedBytes] = []
    async for batch in batches:
        first += _bytes_of(batch)
        if sum(len(part.data) for part in first) > size:
            break
    return first


class ByteStream(Response):
    """Response of bytes.

    If the answer fails after its start, the connection is aborted, so that the answer does not look complete.
    """

    def __init__(
        self,
        stream: GenerationStream,
        first: list[PassedBytes],
        rest: AsyncIterator[list[Event]],
        close: Callable[[], None],
    ) -> None:
        super().__init__()
        self._stream = stream
        self._first = first
        self._rest = rest
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._stream):
            try:
                failure = await until_disconnect(Request(scope, receive), outcome(self._send(send)))
                if failure is not None:
                    raise failure
            except ClientGone:
                return
            finally:
                self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._head()})
        for part in self._first:
            await send({"type": "http.response.body", "body": part.data, "more_body": True})
        async for batch in self._rest:
            for part in _bytes_of(batch):
                await send({"type": "http.response.body", "body": part.data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _head(self) -> list[tuple[bytes, bytes]]:
        found = self._first[0].media_type if self._first else OTHER_TYPE
        safe = found if found.lower().startswith(SAFE_TYPES) and found.isprintable() and found.isascii() else OTHER_TYPE
        headers: Mapping[str, str] = {
            "content-type": safe,
            "x-content-type-options": "nosniff",
            "x-accel-buffering": "no",
            **backend_header([self._stream.report]),
        }
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def _bytes_of(batch: list[Event]) -> list[PassedBytes]:
    return [event for event in batch if isinstance(event, PassedBytes)]
