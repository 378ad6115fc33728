"""Connection that sends a large body in pieces, as fast as the server reads them."""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import AsyncIterator

from unisono.net.http_connection import HttpClientConnection
from unisono.net.http_response import HttpResponse


class UploadConnection(HttpClientConnection):
    """Connection whose writer waits for the server.

    A server may respond before it has read the whole body, for example with status 413. The rest of the body is then
    not sent, and the connection is not used again.
    """

    _is_write_paused = False
    _is_cut = False  # True if the body was not sent completely
    _writer: Future[None] | None = None

    @property
    def is_idle(self) -> bool:
        return not self._is_cut and super().is_idle

    async def send_pieces(self, head: bytes, pieces: AsyncIterator[bytes]) -> HttpResponse:
        """Send a request and return its response, whose head may not have arrived yet."""
        response = self.send(head, b"")
        assert self._transport is not None
        self._is_cut = True
        async for piece in pieces:
            while self._is_write_paused and not (response.has_data or response.is_finished):
                self._writer = asyncio.get_running_loop().create_future()
                await self._writer
            if response.has_data or response.is_finished:
                return response
            self._transport.write(piece)
        self._is_cut = False
        return response

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._wake_writer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wake_writer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wake_writer()

    def _wake_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None and not writer.done():
            writer.set_result(None)
