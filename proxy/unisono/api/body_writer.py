"""Server's own writer of response bodies, which bypasses the ASGI layers."""

from __future__ import annotations

from typing import Protocol

# Keys, in the request's state, of the server's own `send` and `BodyWriter`. The ASGI layers change only the head of a
# response, so the body of a stream bypasses them.
SEND_BODY = "send_body"
BODY_WRITER = "body_writer"


class BodyWriter(Protocol):
    """Writer of parts of a response's body. `write` requires that `is_ready` returns True."""

    def join_head(self) -> None:
        """Write the head of the response together with the first part of the body, not alone.

        Call this method before the head is sent. Each write costs a system call and may wake the client.
        """
        ...

    def is_head_written(self) -> bool:
        """Return whether the head was written. It never is if the client disconnected first."""
        ...

    def is_ready(self) -> bool: ...

    def write(self, body: bytes) -> None: ...
