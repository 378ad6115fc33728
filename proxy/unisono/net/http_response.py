"""Response of an HTTP/1.1 server, which can be read while it arrives.

The response buffers the bytes of its body until they are read, and wakes its reader once per network read. If too many
bytes are buffered, the connection stops reading from the socket, so that a slow reader slows the server down.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable
from copy import copy
from typing import Protocol, Self

from unisono.net.connection_faults import ConnectionFault, ConnectionLost

# Reading from the socket pauses when more than twice this number of bytes are buffered, and resumes at this number.
BUFFER_BYTES = 16 * 1024
# If there are more buffered chunks, they are joined: a tiny bytes object takes about twenty times the memory of its
# content.
MAX_SEPARATE_CHUNKS = 256


class ResponseSource(Protocol):
    """Connection on which a response arrives."""

    def resume_reading(self) -> None:
        """Read from the socket again."""
        ...

    def release(self, response: HttpResponse) -> None:
        """Detach the response, and close the connection if the response is incomplete."""
        ...


class HttpResponse:
    """Response to one request. `headers` has names in lower case.

    `status` is 0 until the head is complete.
    """

    __slots__ = (
        "_chunks", "_connection", "_fault", "_is_paused", "_new_future", "_size", "consume", "has_data", "headers",
        "is_complete", "is_finished", "is_readable", "status", "waiter",
    )  # fmt: skip

    def __init__(self, connection: ResponseSource) -> None:
        self._connection: ResponseSource | None = connection
        self.status = 0
        self.headers: dict[str, str] = {}
        self.has_data = False  # True once any bytes have arrived
        self.is_complete = False
        self.is_finished = False  # True once the response is complete or has failed
        self.is_readable = False  # True if `read_nowait` has a result other than None
        self._fault: ConnectionFault | None = None
        self._chunks: list[bytes] = []
        self._size = 0
        self._is_paused = False
        self.waiter: Future[None] | None = None
        self.consume: Callable[[bytes], bool] | None = None  # callback of the waiting reader
        self._new_future = asyncio.get_running_loop().create_future

    @property
    def content_type(self) -> str:
        """Media type in lower case, without parameters."""
        return self.headers.get("content-type", "application/octet-stream").partition(";")[0].strip().lower()

    async def with_head(self) -> Self:
        """Wait for the head and return this response.

        Raises ConnectionFault if no head arrives; the response is then closed.
        """
        try:
            while not self.status and self._fault is None:
                await self.next_data()
        except BaseException:
            self.close()
            raise
        if not self.status and self._fault is not None:
            self.close()
            raise copy(self._fault)
        return self

    def read_nowait(self, limit: int) -> bytes | None:
        """Return at most `limit` bytes of the body that have arrived; None if no bytes are buffered.

        Return b"" at the end of the body. Raises ConnectionFault after the last bytes of a failed response.
        """
        chunks = self._chunks
        if not chunks:
            if self.is_complete:
                return b""
            if self._fault is not None:
                # A raised exception refers to this response through its traceback, so the response must not refer to
                # it. Such a cycle would keep the whole answer in memory.
                raise copy(self._fault)
            return None
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        size = len(data)
        if size > limit:
            chunks.append(data[limit:])
            data = data[:limit]
            size = limit
        else:
            self.is_readable = self.is_finished
        self._size -= size
        if self._is_paused and self._size <= BUFFER_BYTES and self._connection is not None:
            self._is_paused = False
            self._connection.resume_reading()
        return data

    def next_data(self, consume: Callable[[bytes], bool] | None = None) -> Future[None]:
        """Return a future that is done when data arrives, the response ends, or the response fails.

        Only one reader may wait at a time.

        `consume` is a shortcut that saves a task switch per read. The network callback calls `consume` with the data of
        each short read (at most `MAX_DIRECT_BYTES`). If `consume` returns True, the reader keeps waiting; otherwise,
        the future is done. If `consume` raises an error, the future gets this error.
        """
        self.consume, waiter = consume, self._new_future()
        self.waiter = waiter
        return waiter

    async def read(self, limit: int) -> bytes:
        """Wait for bytes of the body and return at most `limit` bytes; b"" at the end of the body.

        Raises ConnectionFault if the response fails.
        """
        while (data := self.read_nowait(limit)) is None:
            await self.next_data()
        return data

    def close(self) -> None:
        """Release the connection, or abort it if the response is incomplete. Repeatable."""
        connection, self._connection = self._connection, None
        self.consume = None  # it may refer to this response
        if connection is not None:
            if not self.is_finished:
                self.fail(ConnectionLost("the response was closed"))
            connection.release(self)

    # -- called by the connection

    @property
    def is_waiting(self) -> bool:
        """Return whether a reader waits and nothing is buffered."""
        return self.waiter is not None and not self.is_readable and not self.waiter.done()

    def give(self, read: bytes, consume: Callable[[bytes], bool]) -> None:
        """Call `consume` with the data of a read, and wake the reader unless it returns True."""
        try:
            if not consume(read):
                self.wake()
        except Exception as error:
            self._wake_with(error)

    def add_body(self, parts: list[bytes]) -> bool:
        """Buffer the body parts of one network read; return whether reading must pause now."""
        chunks = self._chunks
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        chunks.append(data)
        self.is_readable = True
        if len(chunks) > MAX_SEPARATE_CHUNKS:
            chunks[:] = [b"".join(chunks)]
        self._size += len(data)
        was_paused, self._is_paused = self._is_paused, self._is_paused or self._size > 2 * BUFFER_BYTES
        return self._is_paused and not was_paused

    def complete(self) -> None:
        """Record the end of the body."""
        self.is_complete = self.is_finished = self.is_readable = True

    def fail(self, fault: ConnectionFault) -> None:
        """Record a failure unless the response is complete, and wake the reader."""
        if not self.is_finished:
            self._fault = fault
            self.is_finished = self.is_readable = True
        self.wake()

    def _wake_with(self, error: Exception) -> None:
        """Raise an error in the reader."""
        # In a function of its own: the traceback of the error must not refer to the future, which refers to the error.
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def wake(self) -> None:
        """Wake the reader."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
