"""Bridge between the SDK's transports and sessions.

It detects the end of a stream, and attaches exchange records to messages.
"""

from __future__ import annotations

import asyncio
import contextvars
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol, Self

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCRequest, JSONRPCResponse

from unisono.mcp.messages import CALL, EXCHANGE, Exchange, OutgoingMessage
from unisono.mcp.response_filter import shorten


class ReadStream(Protocol):
    async def receive(self) -> SessionMessage | Exception: ...
    async def aclose(self) -> None: ...


class WriteStream(Protocol):
    async def send(self, item: SessionMessage, /) -> None: ...
    async def aclose(self) -> None: ...


class WatchedTransport:
    """Transport that detects its end and attaches an exchange record to each message."""

    def __init__(
        self,
        inner: AbstractAsyncContextManager[tuple[ReadStream, WriteStream]],
        ended: asyncio.Event,
        *,
        entries: int,
    ) -> None:
        self._inner = inner
        self._ended = ended
        self._entries = entries

    async def __aenter__(self) -> tuple[_Inbox, _Outbox]:
        reading, writing = await self._inner.__aenter__()
        return _Inbox(reading, self._ended, self._entries), _Outbox(writing)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._inner.__aexit__(kind, error, trace)


class _Stream:
    def __init__(self, inner: ReadStream | WriteStream) -> None:
        self._stream = inner

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        await self.aclose()
        return None


class _Inbox(_Stream):
    """Messages of the server. The end of the stream ends the session."""

    def __init__(self, inner: ReadStream, ended: asyncio.Event, entries: int) -> None:
        super().__init__(inner)
        self._inner = inner
        self._ended = ended
        self._entries = entries

    @property
    def last_context(self) -> contextvars.Context | None:
        return getattr(self._inner, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        try:
            item = await self._inner.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._ended.set()
            raise
        if isinstance(item, SessionMessage) and isinstance(item.message, JSONRPCResponse):
            shorten(item.message.result, self._entries)
        return item

    def __aiter__(self) -> _Inbox:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None


class _Outbox(_Stream):
    """Messages to the server.

    A request carries the exchange record that its caller observes. Any other message gets its own record. Such a
    message is abandoned after a short timeout, because the SDK sends nothing else until the server has accepted the
    message.
    """

    def __init__(self, inner: WriteStream) -> None:
        super().__init__(inner)
        self._inner = inner

    async def send(self, item: SessionMessage) -> None:
        is_request = isinstance(item.message, JSONRPCRequest)
        exchange = (CALL.get() if is_request else None) or Exchange(aside=not is_request)
        token = EXCHANGE.set(exchange)
        try:
            # The transport sets this when it writes the message. An earlier message with this record may have set it.
            exchange.sent = False
            await self._inner.send(OutgoingMessage(item.message, item.metadata, exchange))
        finally:
            EXCHANGE.reset(token)
