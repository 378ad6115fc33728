"""Supervisor process: starts and restarts workers, forwards signals and cleans up.

It binds the port and serves no requests. Workers are new interpreter processes, not forks, so they inherit no threads
or locks. Each worker receives its configuration over a socket. When the supervisor ends, even by a crash, this socket
is closed, and the worker exits too. Workers run in separate sessions, so only the supervisor receives Ctrl-C.

uvicorn's supervisor lacks the following properties. Measured with two workers:

- If the supervisor is killed, the workers exit: here after 0.2 s. uvicorn's workers still served the port after 5 s,
  and nothing would end them.
- There are pauses between restarts. When every worker was killed as soon as it ran, there were 12 starts in 10 s
  instead of 40.
- A signal has an effect at any time. uvicorn ignores SIGTERM during a restart by SIGHUP: with 15 s streams it answered
  new requests for another 13.5 s.
- A reload aborts no stream (see `config_reload`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import IO

from unisono.config import Config
from unisono.errors import ConfigError
from unisono.observe.logs import start_logging
from unisono.observe.redaction import secrets_of
from unisono.server.accept_balancer import NOT_RUNNING, Loads
from unisono.server.config_reload import keep_start_settings, log_rejected_reload
from unisono.server.ipc import Accepted, Serve, Up, next_message, to_bytes

# Pauses before a restart, in seconds, by the number of consecutive short runs. After that, the last pause is used.
PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
# A run is short if it lasts less than this number of seconds.
LONG_S = 60.0
# Seconds after the grace period in which workers must exit before they are killed.
LEAVING_S = 15.0
# Environment variable with the directory for engine processes that workers share.
ENGINES = "UNISONO_ENGINES"
# Environment variable of the Prometheus library: directory for metrics of all workers.
METRICS = "PROMETHEUS_MULTIPROC_DIR"

log = logging.getLogger("unisono.serve")


@dataclass(slots=True)
class WorkerProcess:
    process: asyncio.subprocess.Process
    writer: asyncio.StreamWriter
    hearing: asyncio.Task[None]
    # Number of the reload whose configuration was last sent to this worker; 0 for the configuration at startup.
    reload: int

    def send(self, order: Serve, place: int) -> None:
        self.reload = order.reload
        self.writer.write(to_bytes(replace(order, place=place)))

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)


class Supervisor:
    """Owner of the listener and of all worker processes.

    `order` is the first message to each worker, except that each worker gets its own `place` (its number, from 0).
    `read_again` returns the new configuration for a reload, or raises ConfigError. `show` prints the startup screen.

    Workers that start later use a new configuration only after a running worker has accepted it. Some errors, such as
    an address that is in use, are found only when a worker starts an application with the configuration.
    """

    def __init__(
        self,
        listener: socket.socket,
        order: Serve,
        *,
        read_again: Callable[[], Config],
        show: Callable[[Sequence[str]], None],
    ) -> None:
        self._listener = listener
        self._order = order
        self._reload_config = read_again
        self._show = show
        self._memory: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the run
        self._loads = Loads(self._memory.fileno(), order.share)
        self._engines = tempfile.mkdtemp(prefix="unisono-engines-")
        self._metrics = tempfile.mkdtemp(prefix="unisono-metrics-")
        self._workers: dict[int, WorkerProcess] = {}
        # Startup screens by place, of the workers that have started to serve.
        self._ready_workers: dict[int, tuple[str, ...]] = {}
        self._has_served = False
        # Places of the workers that are serving.
        self._serving: set[int] = set()
        self._leaving = asyncio.Event()
        self._reloading = asyncio.Lock()
        self._reload_count = 0

    async def run(self) -> bool:
        """Run until a signal ends all workers. Return whether any worker has started to serve."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        reloads: set[asyncio.Task[None]] = set()

        def reload() -> None:
            reloads.add(asyncio.create_task(self._reload()))

        loop.add_signal_handler(signal.SIGHUP, reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        try:
            for place in range(self._order.share):
                self._loads.set_load(place, NOT_RUNNING)
            async with asyncio.TaskGroup() as places:
                for place in range(self._order.share):
                    places.create_task(self._keep_running(place))
        finally:
            for task in reloads:
                task.cancel()
            await asyncio.gather(*reloads, return_exceptions=True)
            self._listener.close()
            self._memory.close()
            shutil.rmtree(self._engines, ignore_errors=True)
            shutil.rmtree(self._metrics, ignore_errors=True)
        return bool(self._ready_workers)

    # -- workers

    async def _keep_running(self, place: int) -> None:
        """Restart the worker at `place` whenever it exits, until shutdown."""
        short_lives = 0
        while not self._leaving.is_set():
            began = monotonic()
            code = await self._live(place)
            if self._leaving.is_set():
                return
            if not self._ready_workers:
                # No worker has started yet, and the others would probably fail for the same reason.
                log.error("a worker exited during startup", extra={"code": code})
                self._on_signal(signal.SIGTERM)
                return
            short_lives = 0 if monotonic() - began > LONG_S else short_lives + 1
            pause_s = PAUSES_S[min(short_lives, len(PAUSES_S)) - 1] if short_lives else 0.0
            log.error("a worker exited; another one is started", extra={"code": code, "pause_s": pause_s})
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._leaving.wait()

    async def _live(self, place: int) -> int:
        """Run one worker process and return its exit code."""
        worker = await self._start(place)
        self._workers[place] = worker
        if self._leaving.is_set():
            worker.signal(signal.SIGTERM)
        ending = asyncio.create_task(self._bounded(worker))
        try:
            return await worker.process.wait()
        finally:
            ending.cancel()
            del self._workers[place]
            self._loads.set_load(place, NOT_RUNNING)
            self._forget(place)
            worker.writer.close()
            await worker.hearing
            self._serving.discard(place)

    def _forget(self, place: int) -> None:
        """Delete the live gauges of a worker that has exited.

        The worker's counters stay, and the worker that replaces it continues these counters.
        """
        for path in Path(self._metrics).glob(f"gauge_live*_{place}.db"):
            path.unlink(missing_ok=True)

    async def _bounded(self, worker: WorkerProcess) -> None:
        """Kill a worker that has not exited by the end of the grace period of a shutdown."""
        await self._leaving.wait()
        await asyncio.sleep(self._order.config.unisono.shutdown_grace_s + LEAVING_S)
        worker.signal(signal.SIGKILL)

    async def _start(self, place: int) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        files = (self._listener.fileno(), self._memory.fileno(), theirs.fileno())
        with theirs:
            process = await asyncio.create_subprocess_exec(
                # -P: do not import from the current directory.
                *(sys.executable, "-P", "-m", "unisono.server.worker", *map(str, files)),
                pass_fds=files,
                env={**os.environ, ENGINES: self._engines, METRICS: self._metrics},
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        hearing = asyncio.create_task(self._read_messages(place, reader))
        worker = WorkerProcess(process, writer, hearing, self._order.reload)
        worker.send(self._order, place)
        return worker

    async def _read_messages(self, place: int, reader: asyncio.StreamReader) -> None:
        while (message := await next_message(reader)) is not None:
            if isinstance(message, Up):
                self._serving.add(place)
                self._ready_workers[place] = message.screen
            elif isinstance(message, Accepted):
                self._adopt(message.order)
            # The screen says that the gateway serves, so it is printed when the last worker has started.
            if not self._has_served and len(self._ready_workers) == self._order.share:
                self._has_served = True
                self._show(self._ready_workers[min(self._ready_workers)])

    # -- signals

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._leaving.is_set():
            self._leaving.set()
            # Connections are refused once the workers have closed their copies of the listener.
            self._listener.close()
        for worker in self._workers.values():
            worker.signal(number)

    async def _reload(self) -> None:
        async with self._reloading:
            try:
                config = await asyncio.to_thread(self._reload_config)
            except ConfigError as error:
                log_rejected_reload(error)
                return
            self._reload_count += 1
            config = keep_start_settings(config, self._order.config)
            order = replace(self._order, config=config, reload=self._reload_count)
            if self._ready_workers and not self._serving:
                # No worker is running that could accept the new configuration. Perhaps all fail with the current
                # configuration.
                self._adopt(order)
            self._send(order)

    def _adopt(self, order: Serve) -> None:
        """Use the configuration of `order` for all workers that start from now on."""
        if order.reload <= self._order.reload:
            return
        self._order = order
        settings = order.config.unisono
        start_logging(settings.log_level, secrets_of(order.config), log_format=settings.log_format)
        # Workers that started during the reload have the previous configuration, so they get the new configuration now.
        self._send(order)

    def _send(self, order: Serve) -> None:
        for place, worker in self._workers.items():
            if worker.reload < order.reload:
                worker.send(order, place)
