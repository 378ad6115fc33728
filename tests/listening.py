"""TCP servers for tests that close all their connections, including those still being accepted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
# More event loop iterations than a connection needs from the accept to the first step of its task.
STEPS_OF_ACCEPTING = 10


class Listener:
    """TCP server with one task per connection; the connection is closed when its task ends."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._live: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0, **options: Any) -> None:
        self._server = await asyncio.start_server(self._on_connection, host, port, **options)

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def cut(self) -> None:
        """Close all open connections."""
        for _ in range(STEPS_OF_ACCEPTING):
            await asyncio.sleep(0)
        while tasks := list(self._live):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        # A transport closes its socket one loop iteration after `close()`.
        await asyncio.sleep(0)

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
            await self.cut()

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._live[task] = writer
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            # The peer closed the connection.
            writer.transport.abort()
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        finally:
            writer.close()
            del self._live[task]


@asynccontextmanager
async def listening(serve: Serve, host: str = "127.0.0.1", port: int = 0, **options: Any) -> AsyncIterator[Listener]:
    """Start a listener; close it and its connections at the end of the context."""
    listener = Listener(serve)
    await listener.start(host, port, **options)
    try:
        yield listener
    finally:
        await listener.aclose()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to a port of this machine; reset the connection at the end of the context."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
