"""TCP servers of tests that leave no connection open behind them, not even one that was only being accepted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
STEPS_OF_ACCEPTING = 10
"""Turns of the loop, amply, from a connection that the system gave out to the first step of the task that serves it."""


class Listener:
    """Serves each connection in a task of its own; whichever way that ends, the connection goes with it."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._live: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0, **options: Any) -> None:
        self._server = await asyncio.start_server(self._joined, host, port, **options)

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def cut(self) -> None:
        """End every connection there is."""
        for _ in range(STEPS_OF_ACCEPTING):
            await asyncio.sleep(0)
        while tasks := list(self._live):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        # A transport closes its socket one turn after it is told to.
        await asyncio.sleep(0)

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
            await self.cut()

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._live[task] = writer
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            # The other side left.
            writer.transport.abort()
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        finally:
            writer.close()
            del self._live[task]


@asynccontextmanager
async def listening(serve: Serve, host: str = "127.0.0.1", port: int = 0, **options: Any) -> AsyncIterator[Listener]:
    """A listener, gone with its connections when it is left."""
    listener = Listener(serve)
    await listener.start(host, port, **options)
    try:
        yield listener
    finally:
        await listener.aclose()


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to this machine, reset when it is left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
