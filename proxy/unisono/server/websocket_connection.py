"""WebSocket connection with a write timeout, a fragment limit, and the API's error format.

uvicorn limits only the size of a message. A message of a million fragments with one byte each took 28 MB of memory with
uvicorn, and 2 MB here before the connection was closed.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import Transport
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import MAX_LINE_LENGTH, MAX_NUM_HEADERS
from websockets.server import ServerProtocol

from unisono.api.error_responses import Formats
from unisono.core.log_rate import RateLimitedWarning
from unisono.errors import MalformedRequest
from unisono.server.request_head import refusal
from unisono.server.write_timeout import Delivering, Delivery

if TYPE_CHECKING:
    from starlette.types import Message
    from websockets.frames import Frame
    from websockets.http11 import Request

SWITCHED = 101
# WebSocket close code for text that is not UTF-8.
INVALID_DATA = 1007
# WebSocket close code for a message over the limit.
MESSAGE_TOO_BIG = 1009
# WebSocket close code for a flood of frames.
POLICY_VIOLATION = 1008
# Maximum number of fragments of a message, since a fragment takes memory in addition to its bytes. The largest message
# has 10 MiB, so a client may send it in fragments of 640 bytes.
MAX_FRAGMENTS = 16 * 1024
# Maximum number of frames, and of control frames (such as pings and pongs), in one read of up to 256 KiB. A frame takes
# about 20 microseconds, during which the process serves no other connection.
MAX_FRAMES_PER_READ = 4096
MAX_CONTROL_FRAMES_PER_READ = 100
# Opcodes from this number on belong to control frames.
FIRST_CONTROL_OPCODE = 8
# A read is parsed in slices of this many bytes. Frames are counted after each slice.
SLICE = 4096
MALFORMED_TEXT = RateLimitedWarning(logging.getLogger(__name__))


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class WebSocketConnection(Delivering, WebSocketsSansIOProtocol):
    """uvicorn's WebSocket connection with a write timeout and limits.

    `formats` maps paths to the error formats of APIs.
    """

    HEADER_LIMITS = (
        f"A WebSocket request may have at most {MAX_NUM_HEADERS} headers of {MAX_LINE_LENGTH:,} bytes each; send fewer "
        "or shorter ones."
    )

    def __init__(self, write_timeout_s: float, formats: Formats, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._write_timeout_s = write_timeout_s
        self._formats = formats

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._delivery = Delivery(transport, self._write_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._delivery.rest()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        frames = control_frames = 0
        for begin in range(0, len(data), SLICE):
            self.conn.receive_data(data[begin : begin + SLICE])
            if self.conn.parser_exc is not None:
                self.handle_parser_exception()
                return
            opcodes = [getattr(event, "opcode", 0) for event in self.conn.events]
            frames += len(opcodes)
            control_frames += sum(opcode >= FIRST_CONTROL_OPCODE for opcode in opcodes)
            if frames > MAX_FRAMES_PER_READ or control_frames > MAX_CONTROL_FRAMES_PER_READ:
                self.conn.fail(POLICY_VIOLATION, "too many frames at once")
                self.handle_parser_exception()
                return
            self.handle_events()
            if self.transport.is_closing():
                return

    def handle_connect(self, event: Request) -> None:
        tried = ServerProtocol(logger=self.logger).accept(event)
        if tried.status_code == SWITCHED:
            super().handle_connect(event)
            return
        # The library's own response would be plain text.
        self.handshake_initiated = self.handshake_complete = self.close_sent = True
        error = MalformedRequest(tried.body.decode("utf-8", "replace").partition("\n")[0])
        self.transport.write(refusal(error, event.path.encode(), self._formats))
        self.transport.close()

    def handle_cont(self, event: Frame) -> None:
        if self.close_sent:
            return
        if len(self.frames) >= MAX_FRAGMENTS:
            self.conn.send_close(MESSAGE_TOO_BIG, f"more than {MAX_FRAGMENTS} fragments")
            self.handle_parser_exception()
            return
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        frames = self.frames
        if self.curr_msg_data_type == "text" and not self.close_sent and not _is_utf8(b"".join(frames)):
            # uvicorn logs a traceback for every such message.
            MALFORMED_TEXT.warn("a client sent WebSocket text that is not UTF-8; its connection was closed")
            self.conn.send_close(INVALID_DATA)
            self.handle_parser_exception()
            return
        super().send_receive_event_to_app()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._delivery.watch()

    async def send(self, message: Message) -> None:  # type: ignore[override]
        await super().send(message)  # type: ignore[arg-type]
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            # A refusal also completes the handshake; uvicorn would report it as an application error.
            self.handshake_complete = True

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        self._delivery.watch()
