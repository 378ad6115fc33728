"""Graceful shutdown of one gateway process.

SIGTERM: readiness fails at once. If readiness was probed recently, as by a load balancer, the listener stays open until
`shutdown_delay_s` has passed. Then it closes, running responses get the rest of `shutdown_grace_s` (which counts from
the signal), and the remaining ones end with an error. SIGINT skips the delay. A second signal skips all waiting.

uvicorn closes idle connections at once and aborts streams at the end of the grace period. Measured with 80 clients that
reuse their connections (20 at a time, a request every 20 ms): at SIGTERM all 80 lost a request with uvicorn's shutdown,
and none with this shutdown. A stream that uvicorn aborts ends without an error event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from unisono.server.config_reload import AppSwitch

# Maximum idle time of a client's connection, in seconds.
KEEP_ALIVE_S = 75
# If readiness was probed within this time before the signal, further probes are expected, in seconds.
PROBE_RECENCY_S = 60.0
# Idle time after which no further request is expected on a connection, in seconds.
QUIET_S = 0.5
# Seconds between two checks whether the requests have ended.
LOOK_S = 0.05


class GracefulShutdown:
    """Shutdown of the requests and connections of one process.

    Call `begin`, `end_requests` and `hand_over` in this order. `skip_waiting` may be called at any time. `state`
    contains the open connections. `grace_s` is the time in seconds from `begin` until running responses are ended.
    """

    def __init__(self, switch: AppSwitch, state: ServerState, grace_s: float) -> None:
        self._switch = switch
        self._state = state
        self._grace_s = grace_s
        self._ends_at = 0.0
        # True if the listener need not stay open for readiness probes that still have to see the shutdown.
        self._has_notice = True
        self._is_hurried = asyncio.Event()

    def begin(self, *, notice: bool) -> None:
        """Make readiness fail, and start the grace period.

        With `notice`, the listener stays open so that readiness probes can see the shutdown.
        """
        now = monotonic()
        self._ends_at = now + self._grace_s
        self._has_notice = not (notice and now - self._switch.last_probe_at < PROBE_RECENCY_S)
        self._switch.set_not_ready()

    def skip_waiting(self) -> None:
        """End all requests without waiting any longer."""
        self._is_hurried.set()

    async def end_requests(self, close_listeners: Callable[[], None]) -> None:
        """Close the listeners, wait for running responses, and close all connections.

        Responses that still run when the grace period ends get an error.
        """
        # uvicorn can also end by itself, without a signal.
        self._ends_at = self._ends_at or monotonic() + self._grace_s
        if not self._has_notice:
            notice_s = self._switch.gateway.config.unisono.shutdown_delay_s
            with suppress(TimeoutError):
                async with asyncio.timeout(min(notice_s, self._ends_at - monotonic())):
                    await self._is_hurried.wait()
        close_listeners()
        closed_at = asyncio.get_running_loop().time()
        while True:
            finished = await self._switch.finished(LOOK_S)
            if self._close_quiet(closed_at) and finished:
                break
            if self._is_hurried.is_set() or monotonic() > self._ends_at:
                await self._switch.end()
                break
            await asyncio.sleep(LOOK_S)
        for connection in list(self._state.connections):
            connection.shutdown()

    async def hand_over(self) -> None:
        """Hand over background responses. Their tool calls get the rest of the grace period."""
        handing = asyncio.create_task(self._switch.hand_over(max(self._ends_at - monotonic(), 0.0)))
        hurried = asyncio.create_task(self._is_hurried.wait())
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
        asking = [each for each in self._state.connections if isinstance(each, HttpToolsProtocol)]
        for connection in asking:
            if connection.cycle is None or connection.cycle.response_complete:
                timer = connection.timeout_keep_alive_task
                quiet_since = closed_at if timer is None else timer.when() - KEEP_ALIVE_S
                if now - quiet_since > QUIET_S:
                    connection.shutdown()
        return all(each.transport.is_closing() for each in asking)
