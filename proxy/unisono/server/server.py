"""uvicorn server of one process: listener, signals and configuration reload.

SIGTERM and SIGINT start the graceful shutdown of `unisono.server.shutdown`. SIGHUP reloads the configuration.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from unisono.api.messages.error_format import ERROR_FORMATS
from unisono.bootstrap.gateway import Gateway
from unisono.config import Config
from unisono.errors import ConfigError, UnisonoError
from unisono.server.accept_balancer import Accepting, AcceptingProcess
from unisono.server.config_reload import PROBE_PATIENCE_S, AppSwitch, log_rejected_reload
from unisono.server.listener import connections
from unisono.server.shutdown import KEEP_ALIVE_S, GracefulShutdown

BACKLOG = 2048
# Number of new objects after which the garbage collector collects the young generation.
GC_THRESHOLD = 10_000
# Interval between pings on an open WebSocket, in seconds.
PING_EVERY_S = 20.0
# Maximum time until a pong arrives, in seconds. Clients that read slowly respond late.
PONG_WITHIN_S = 60.0

Started = Callable[[Gateway], Awaitable[None]]


def connection_limit(config: Config, share: int) -> int:
    """Return the maximum number of connections of each of `share` processes."""
    return -(-config.unisono.max_connections // share)


def server_config(app: object, config: Config, share: int = 1) -> uvicorn.Config:
    """Return the uvicorn configuration of one of `share` processes."""
    settings = config.unisono
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        loop="uvloop",
        http=connections(
            settings.header_timeout_s,
            write_timeout_s=settings.write_timeout_s,
            max_connections=connection_limit(config, share),
            formats=ERROR_FORMATS,
        ),
        # `HttpConnection` creates its own protocol for a WebSocket. By default, uvicorn would import one at startup.
        ws=asyncio.Protocol,
        ws_max_size=settings.max_body_bytes,
        ws_ping_interval=PING_EVERY_S,
        ws_ping_timeout=PONG_WITHIN_S,
        # Compressed messages could expand beyond the size limit. Request bodies follow the same rule.
        ws_per_message_deflate=False,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=settings.shutdown_grace_s,
    )


class GatewayServer(uvicorn.Server):
    """uvicorn server of one gateway process.

    `started` is called once, when the server listens and its backends were probed. `reload` reads and applies the
    configuration. It is called on SIGHUP and by `reload_soon`; if it raises ConfigError, the error is logged and
    nothing changes. If `place` is given, the listener is shared with other processes, and the process with the fewest
    connections accepts the next connection.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        switch: AppSwitch,
        *,
        started: Started,
        reload: Callable[[], Awaitable[None]],
        place: AcceptingProcess | None = None,
    ) -> None:
        super().__init__(config)
        self._switch = switch
        self._started = started
        self._reload = reload
        self._place = place
        self._is_up = asyncio.Event()
        self._accepting: Accepting | None = None
        self._shutdown = GracefulShutdown(switch, self.server_state, float(config.timeout_graceful_shutdown or 0))
        self._loop: asyncio.AbstractEventLoop
        self._reloading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._place is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            assert sockets is not None
            self._accepting = Accepting(sockets[0], self._place, self._connect, self.server_state.connections)
            self._accepting.start()
        if self.should_exit:  # the application failed to start
            self._is_up.set()
            return
        await self._switch.gateway.pool.wait_for_probes(PROBE_PATIENCE_S)
        # Objects that are created at startup live as long as the process. Repeated collections of them would stall
        # every stream for tens of milliseconds. A collection before the freeze would take a tenth of the startup time,
        # and free only 3,000 of 180,000 objects.
        gc.freeze()
        gc.enable()
        # Few objects of an answer form cycles, but each young collection visits the objects of all answers in progress.
        gc.set_threshold(GC_THRESHOLD)
        if not self.should_exit:
            await self._started(self._switch.gateway)
        self._is_up.set()

    async def _connect(self, connection: socket.socket) -> None:
        def protocol() -> HttpToolsProtocol:
            return self.config.http_protocol_class(  # type: ignore[call-arg, return-value]
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )

        await self._loop.connect_accepted_socket(protocol, connection)

    async def on_tick(self, counter: int) -> bool:
        if self._accepting is not None:
            self._accepting.set_load()
        return await super().on_tick(counter)

    # -- signals

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        self._loop = asyncio.get_running_loop()
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        # The supervisor handles SIGHUP for its workers.
        if self._place is None:
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._handle_reload)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.start_shutdown(notice=sig == signal.SIGTERM)

    def start_shutdown(self, *, notice: bool) -> None:
        """Start the shutdown; a second call skips all waiting.

        For `notice`, see `GracefulShutdown.begin`.
        """
        if self.should_exit:
            self._loop.call_soon_threadsafe(self._shutdown.skip_waiting)
            return
        self._shutdown.begin(notice=notice)
        self.should_exit = True

    def _handle_reload(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self.reload_soon)

    def reload_soon(self) -> None:
        """Schedule a reload of the configuration. Reloads run one at a time."""
        task = asyncio.create_task(self._reloaded(), name="reload")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reloaded(self) -> None:
        # A reload waits until the startup is complete.
        await self._is_up.wait()
        async with self._reloading:
            if self.should_exit:
                return
            try:
                await self._reload()
                # uvicorn reads this limit for each new WebSocket.
                self.config.ws_max_size = self._switch.gateway.config.unisono.max_body_bytes
            except (ConfigError, UnisonoError, OSError) as error:
                log_rejected_reload(error)

    # -- shutdown

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._shutdown.end_requests(lambda: self._close_listeners(sockets or []))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._shutdown.hand_over()
        await self.lifespan.shutdown()

    def _close_listeners(self, sockets: Sequence[socket.socket]) -> None:
        if self._accepting is not None:
            self._accepting.stop()
        for server in self.servers:
            server.close()
        for each in sockets:
            each.close()
