"""uvicorn server of one process with graceful shutdown and configuration reload.

SIGTERM: readiness fails at once. If readiness was probed recently, as by a load balancer, the listener stays open until
`shutdown_delay_s` has passed. Then it closes, running responses get the grace period, and the remaining ones end with
an error. SIGINT skips the delay. A second signal skips all waiting. SIGHUP reloads the configuration.

uvicorn closes idle connections at once and aborts streams at the end of the grace period. Measured with 80 clients that
reuse their connections (20 at a time, a request every 20 ms): at SIGTERM all 80 lost a request with uvicorn's shutdown,
and none with this shutdown. A stream that uvicorn aborts ends without an error event.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from types import FrameType

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from unisono.api.messages.error_format import ERROR_FORMATS
from unisono.bootstrap.gateway import Gateway
from unisono.config import Config
from unisono.errors import ConfigError
from unisono.server.accept_balancer import Accepting, AcceptingProcess
from unisono.server.app_switch import PROBE_PATIENCE_S, AppSwitch, log_rejected_reload
from unisono.server.listener import connections

BACKLOG = 2048
KEEP_ALIVE_S = 75
# Number of new objects after which the garbage collector collects the young generation.
GC_THRESHOLD = 10_000
# Interval between pings on an open WebSocket, in seconds.
PING_EVERY_S = 20.0
# Maximum time until a pong arrives, in seconds. Clients that read slowly respond late.
PONG_WITHIN_S = 60.0
# If readiness was probed within this time before the signal, further probes are expected, in seconds.
PROBE_RECENCY_S = 60.0
# Idle time after which no further request is expected on a connection, in seconds.
QUIET_S = 0.5
# Seconds between two checks whether the requests have ended.
LOOK_S = 0.05

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
        self._leave_at = 0.0
        # True if the listener need not stay open for readiness probes that still have to see the shutdown.
        self._has_notice = True
        self._second_signal = asyncio.Event()
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
        await self._switch.gateway.pool.settled(PROBE_PATIENCE_S)
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

        With `notice`, the listener stays open so that readiness probes can see the shutdown.
        """
        if self.should_exit:
            self._loop.call_soon_threadsafe(self._second_signal.set)
            return
        self._leave_at = monotonic()
        is_probed = self._leave_at - self._switch.last_probe_at < PROBE_RECENCY_S
        self._has_notice = not (notice and is_probed)
        self._switch.set_not_ready()
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
            except ConfigError as error:
                log_rejected_reload(error)

    # -- shutdown

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ends_at = (self._leave_at or monotonic()) + float(self.config.timeout_graceful_shutdown or 0)
        if not self._has_notice:
            notice_s = self._switch.gateway.config.unisono.shutdown_delay_s
            with suppress(TimeoutError):
                async with asyncio.timeout(min(notice_s, ends_at - monotonic())):
                    await self._second_signal.wait()
        self._close_listeners(sockets or [])
        closed_at = asyncio.get_running_loop().time()
        while True:
            finished = await self._switch.finished(LOOK_S)
            if self._close_quiet(closed_at) and finished:
                break
            if self._second_signal.is_set() or monotonic() > ends_at:
                await self._switch.end()
                break
            await asyncio.sleep(LOOK_S)
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._hand_over(ends_at)
        await self.lifespan.shutdown()

    async def _hand_over(self, ends_at: float) -> None:
        """Hand over background responses. Their tool calls get the rest of the grace period."""
        handing = asyncio.create_task(self._switch.hand_over(max(ends_at - monotonic(), 0.0)))
        hurried = asyncio.create_task(self._second_signal.wait())
        await asyncio.wait({handing, hurried}, return_when=asyncio.FIRST_COMPLETED)
        for task in (handing, hurried):
            task.cancel()
        await asyncio.gather(handing, hurried, return_exceptions=True)

    def _close_quiet(self, closed_at: float) -> bool:
        """Close idle connections and return whether all connections are closing.

        The client of a connection with a recent response may just be sending another request. This request is answered,
        with `Connection: close`.
        """
        now = asyncio.get_running_loop().time()
        asking = [each for each in self.server_state.connections if isinstance(each, HttpToolsProtocol)]
        for connection in asking:
            if connection.cycle is None or connection.cycle.response_complete:
                timer = connection.timeout_keep_alive_task
                quiet_since = closed_at if timer is None else timer.when() - KEEP_ALIVE_S
                if now - quiet_since > QUIET_S:
                    connection.shutdown()
        return all(each.transport.is_closing() for each in asking)

    def _close_listeners(self, sockets: Sequence[socket.socket]) -> None:
        if self._accepting is not None:
            self._accepting.stop()
        for server in self.servers:
            server.close()
        for each in sockets:
            each.close()
