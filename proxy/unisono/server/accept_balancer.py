"""Distribution of new connections among processes, so that all have about equally many.

All processes wait on one listening socket, and the kernel often wakes the same process. A process that has more
connections than another process waits for `LEFT_LYING_S` before it accepts a new connection. If the connection is still
pending after that, the process accepts it, because the other processes may hang. A process that has reached its maximum
would refuse the connection, so it waits longer (up to `FULL_LEFT_LYING_S`) while another process has room.

uvicorn's workers accept whatever they see first. Measured with 20 connections on one of two workers: the idle worker
received 17 to 20 of the next 20 connections here, and 6 to 11 with uvicorn (five runs each, one connection every 20
ms).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import os
import socket
from collections.abc import Awaitable, Callable, Collection
from functools import partial

from unisono.core.frozen import dataclass

COUNT_BYTES = 8
# Load of a process that is not running. It is so high that no other process waits for this process.
NOT_RUNNING = 2**62
# Seconds that a process waits for processes with fewer connections before it accepts a connection itself.
LEFT_LYING_S = 0.002
# The same for a process that has reached its maximum of connections, in seconds.
FULL_LEFT_LYING_S = 0.5
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
# Pause in seconds when the process has no descriptors or memory left.
RETRY_PAUSE_S = 0.5

log = logging.getLogger("unisono.serve")


class Loads:
    """Connection count of each process, in shared memory.

    `file` is the file descriptor of the shared memory. `places` is the maximum number of processes; each process has a
    place from 0 to `places - 1`.
    """

    def __init__(self, file: int, places: int) -> None:
        os.ftruncate(file, places * COUNT_BYTES)
        self._memory = mmap.mmap(file, places * COUNT_BYTES)
        self._counts = memoryview(self._memory).cast("q")

    def set_load(self, place: int, count: int) -> None:
        self._counts[place] = count

    def least(self) -> int:
        return min(self._counts)


@dataclass(frozen=True, slots=True)
class AcceptingProcess:
    """Process that shares the listener: its number, and the maximum of its connections."""

    loads: Loads
    number: int
    max_connections: int


class Accepting:
    """Acceptor that passes connections of `listener` one at a time to `connect`.

    `connections` are the open connections of this process.
    """

    def __init__(
        self,
        listener: socket.socket,
        place: AcceptingProcess,
        connect: Callable[[socket.socket], Awaitable[None]],
        connections: Collection[object],
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._place = place
        self._connect = connect
        self._connections = connections
        self._connecting: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._on_connection)

    def stop(self) -> None:
        """Accept no further connections. Handovers in progress are completed."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    def set_load(self) -> int:
        """Report the number of this process's connections to the other workers, and return it."""
        count = len(self._connections) + len(self._connecting)
        self._place.loads.set_load(self._place.number, count)
        return count

    def _on_connection(self) -> None:
        if self.set_load() > self._place.loads.least():
            self._leave_until(self._loop.time() + FULL_LEFT_LYING_S)
        else:
            self._accept()

    def _leave_until(self, latest: float) -> None:
        """Give other processes time to accept a connection.

        This process waits for `LEFT_LYING_S`, or until `latest` (event loop time) if it has reached its maximum.
        """
        self._pause_then(LEFT_LYING_S, partial(self._check_remaining_connection, latest))

    def _check_remaining_connection(self, latest: float) -> None:
        limit = self._place.max_connections
        if self.set_load() >= limit > self._place.loads.least() and self._loop.time() < latest:
            self._leave_until(latest)
            return
        self.start()
        self._accept()

    def _accept(self) -> None:
        """Accept a connection, if one is still pending."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            log.warning("cannot accept a connection", extra={"reason": error.strerror})
            self._pause_then(RETRY_PAUSE_S, self.start)
            return
        connection.setblocking(False)
        # asyncio sets this option for sockets that it accepts itself. Without it, small writes wait for an
        # acknowledgement.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = asyncio.create_task(self._hand_over(connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        self.set_load()

    async def _hand_over(self, connection: socket.socket) -> None:
        try:
            await self._connect(connection)
        except OSError:
            connection.close()

    def _pause_then(self, pause_s: float, then: Callable[[], None]) -> None:
        """Ignore the listener for `pause_s` seconds, then call `then`."""
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(pause_s, then)
