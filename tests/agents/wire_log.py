"""Recorder of the shapes of requests in front of a gateway."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from contextlib import suppress
from typing import Any, TypeAlias

from tests.agents.wire_shapes import WireShape, body_lines, header_lines, reported_kind, request_lines

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]


class WireLog:
    """Shapes of the requests of one session, and the gateway's reports on them."""

    def __init__(self) -> None:
        self.shape = WireShape()

    def wrap(self, app: App) -> App:
        """Return the application with this recorder in front of it."""

        async def recorded(scope: Message, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await app(scope, receive, send)
                return
            exchange = RecordedExchange(self.shape, scope)

            async def received() -> Message:
                message = await receive()
                exchange.receive(message)
                return message

            async def sent(message: Message) -> None:
                exchange.send(message)
                await send(message)

            await app(scope, received, sent)
            exchange.finish()

        return recorded


class RecordedExchange:
    """Request and answer over HTTP, or the frames of a WebSocket."""

    def __init__(self, shape: WireShape, scope: Message) -> None:
        self._shape = shape
        self._request = f"{scope.get('method', 'WS')} {scope['path']}"
        self._received = bytearray()
        self._sent = bytearray()
        self._body: Any = None
        self._is_error = False
        shape.lines |= request_lines(self._request, header_lines(scope["headers"]))

    def receive(self, message: Message) -> None:
        match message["type"]:
            case "http.request":
                self._received += message.get("body", b"")
                if not message.get("more_body"):
                    self._add_body(bytes(self._received))
            case "websocket.receive":
                self._add_body(message.get("text") or message.get("bytes") or b"")

    def send(self, message: Message) -> None:
        match message["type"]:
            case "http.response.start":
                self._is_error = 400 <= message["status"] < 500
            case "http.response.body":
                self._sent += message.get("body", b"")
            case "websocket.send":
                self._add_reports((message.get("text") or "").encode())

    def finish(self) -> None:
        """Read the reports in an answer over HTTP."""
        # An agent may close the connection before the gateway has read all of its request.
        self._add_reports(bytes(self._sent))

    def _add_body(self, raw: str | bytes) -> None:
        # Requests without a body, and compressed ones, have only headers.
        with suppress(ValueError):
            self._body = json.loads(raw)
            self._shape.lines |= request_lines(self._request, body_lines(self._body))

    def _add_reports(self, raw: bytes) -> None:
        for line in raw.splitlines():
            if b'"notes"' not in line and b'"error"' not in line:
                continue
            with suppress(ValueError):
                value = json.loads(line.removeprefix(b"data:"))
                is_error = self._is_error or (isinstance(value, dict) and value.get("type") == "error")
                self._report([json.dumps(value)] if is_error else notes_in(value), is_error=is_error)

    def _report(self, texts: Iterable[str], *, is_error: bool) -> None:
        for text in texts:
            kind = reported_kind(self._body, text, is_error=is_error)
            if kind is not None:
                self._shape.reported.setdefault(kind, text)


def notes_in(value: Any) -> Iterator[str]:
    """Yield the notes of the gateway in a body or an event."""
    for inner in value.values() if isinstance(value, dict) else ():
        yield from notes_in(inner)
    notes = value.get("unisono") if isinstance(value, dict) else None
    yield from (notes.get("notes") or ()) if isinstance(notes, dict) else ()
