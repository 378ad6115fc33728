"""Response bodies trimmed on their way to the SDK, whole or per event (see `json_trim`)."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

import httpx2

from unisono.mcp.exchange import Exchange
from unisono.mcp.json_trim import OFF_LOOP_BYTES, TrimLimitReached, trim
from unisono.mcp.limits import McpLimits

TOO_LARGE: Final = "the answer exceeds the size limit"

# A line ends in one of three ways; an empty line ends an event.
_EVENT_END: Final = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
# Longest alternative first, so that CRLF counts as one line end.
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


class ResponseRefused(httpx2.StreamError):
    """A response that is rejected or a request that is not sent; the message gives the reason."""


class _Body(httpx2.AsyncByteStream):
    """Response body that reads `inner`; subclasses trim the messages in it within `limits`."""

    def __init__(self, inner: httpx2.AsyncByteStream, exchange: Exchange, limits: McpLimits) -> None:
        self._inner = inner
        self._chunks = aiter(inner)
        self._exchange = exchange
        self._limits = limits

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._chunks)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _trim(self, data: bytes) -> bytes:
        try:
            return await trim(data, self._limits)
        except TrimLimitReached:
            self._exchange.is_too_large, self._exchange.problem = True, TOO_LARGE
            raise ResponseRefused(TOO_LARGE) from None


class WholeBody(_Body):
    """Body that is one message; calls the exchange's `on_complete` callback after it was read."""

    _is_read = False

    async def __anext__(self) -> bytes:
        if not self._is_read:
            self._is_read = True
            return await self._trim(b"".join([chunk async for chunk in self._chunks]))
        if self._exchange.on_complete is not None:
            self._exchange.on_complete()
        raise StopAsyncIteration


class EventStreamBody(_Body):
    """Body of messages in events.

    An event over the limit passes unchanged, and the SDK rejects it.
    """

    def __init__(self, inner: httpx2.AsyncByteStream, exchange: Exchange, limits: McpLimits) -> None:
        super().__init__(inner, exchange, limits)
        self._buffer = bytearray()
        self._ready: deque[bytes] = deque()
        self._is_complete = False

    async def __anext__(self) -> bytes:
        while not self._ready:
            if self._is_complete:
                raise StopAsyncIteration
            try:
                await self._feed(await anext(self._chunks))
            except StopAsyncIteration:
                self._is_complete = True
                self._ready.append(bytes(self._buffer))
        return self._ready.popleft()

    async def _feed(self, chunk: bytes) -> None:
        # The end of an event may be split between two chunks.
        looked_at = max(len(self._buffer) - 3, 0)
        self._buffer += chunk
        begin = 0
        for end in _EVENT_END.finditer(self._buffer, looked_at):
            event = bytes(self._buffer[begin : end.end()])
            self._ready.append(event if len(event) <= OFF_LOOP_BYTES else await self._trim_event(event))
            begin = end.end()
        if len(self._buffer) - begin > self._limits.answer_bytes:
            self._ready.append(bytes(self._buffer))
            begin = len(self._buffer)
        self._buffer = self._buffer[begin:]

    async def _trim_event(self, event: bytes) -> bytes:
        """Return the event with trimmed data on one line."""
        lines = _LINE_END.split(event)
        data = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
        others = [line for line in lines if line and not line.startswith(b"data:")]
        # In JSON a line break stands between two values, so a space is equivalent.
        return b"\n".join([*others, b"data: " + await self._trim(b" ".join(data)), b"", b""])
