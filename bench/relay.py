"""TCP relay, the minimal gateway and the baseline of all others."""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop


class RelayEnd(asyncio.Protocol):
    """One side of a relayed connection; it writes what it reads to the other side."""

    def __init__(self) -> None:
        self.peer: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transports of uvloop are no subclasses of those of asyncio.
        self.transport = cast("asyncio.Transport", transport)

    def join(self, peer: asyncio.Transport) -> None:
        self.peer = peer
        for data in self._early:
            peer.write(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        if self.peer is None:
            self._early.append(data)
        else:
            self.peer.write(data)

    def pause_writing(self) -> None:
        if self.peer is not None and not self.peer.is_closing():
            self.peer.pause_reading()

    def resume_writing(self) -> None:
        if self.peer is not None and not self.peer.is_closing():
            self.peer.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.peer is not None:
            self.peer.close()


class ClientEnd(RelayEnd):
    """Side of the client; it opens the other side."""

    def __init__(self, upstream: int) -> None:
        super().__init__()
        self._upstream = upstream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._opening = asyncio.ensure_future(self._open())

    async def _open(self) -> None:
        if self.transport is None:
            return
        try:
            transport, back = await asyncio.get_running_loop().create_connection(RelayEnd, "127.0.0.1", self._upstream)
        except OSError:
            self.transport.close()
            return
        back.join(self.transport)
        self.join(transport)
        if self.transport.is_closing():
            transport.close()


async def serve(port: int, upstream: int) -> asyncio.Server:
    return await asyncio.get_running_loop().create_server(lambda: ClientEnd(upstream), "127.0.0.1", port, backlog=1024)


async def main(port: int, upstream: int) -> None:
    listening = await serve(port, upstream)
    await listening.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2])))
