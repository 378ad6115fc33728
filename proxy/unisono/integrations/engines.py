"""Engines embedded in another process: one per backend, all on one loop in their own thread.

Callers may be synchronous, or run on any event loop, even a short-lived one. An engine is built at first use. If there
are too many engines, the least recently used idle ones are closed.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from unisono.bootstrap.deployments import build_pool
from unisono.bootstrap.engine import build_engine
from unisono.config import Config, ModelRegistry, parse
from unisono.engine.request import GenerationService
from unisono.routing.pool import RoutingPool

T = TypeVar("T")

# Maximum number of engines; only idle ones are closed to get below it.
MAX_ENGINES: Final = 64
# Timeout for closing all engines, in seconds.
CLOSING_S: Final = 10.0


class OwnLoop:
    """Event loop in a daemon thread, started at first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def submit(self) -> bool:
        return self._loop is not None

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the loop. Cancelling the returned future cancels `work`."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="unisono", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stop the thread and abandon its unfinished work. The loop restarts at the next use."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(CLOSING_S)
            if not thread.is_alive():
                loop.close()


@dataclass(frozen=True, slots=True)
class Where:
    """Backend address. `model` is `<backend kind>/<the backend's own name for the model>`."""

    model: str
    api_base: str | None = None
    api_key: str | None = field(default=None, repr=False)


@dataclass(eq=False, slots=True)
class _OpenEngine:
    service: GenerationService
    pool: RoutingPool
    running: int = 0


class Engines:
    """Cache of engines on one loop. Not thread-safe."""

    def __init__(self, most: int = MAX_ENGINES) -> None:
        self._max_engines = most
        self._engines: dict[Where, _OpenEngine] = {}

    @asynccontextmanager
    async def at(self, where: Where) -> AsyncIterator[GenerationService]:
        """Yield the engine for a backend. The engine stays open inside the context.

        Raises ConfigError for an invalid model or address.
        """
        engine = self._engines.pop(where, None) or _open(where)
        # The dict is ordered by last use.
        self._engines[where] = engine
        engine.running += 1
        try:
            yield engine.service
        finally:
            engine.running -= 1
            await self._close_idle()

    async def aclose(self) -> None:
        engines, self._engines = list(self._engines.values()), {}
        for engine in engines:
            await engine.pool.aclose()

    async def _close_idle(self) -> None:
        idle = [where for where, engine in self._engines.items() if not engine.running]
        for where in idle[: max(0, len(self._engines) - self._max_engines)]:
            await self._engines.pop(where).pool.aclose()


def config_of(where: Where) -> Config:
    """Build the configuration of one backend.

    Raises ConfigError for an invalid model or address.
    """
    params = {"model": where.model, "api_base": where.api_base, "api_key": where.api_key}
    entry = {
        "model_name": where.model,
        "litellm_params": {name: value for name, value in params.items() if value is not None},
        # Models of this integration always use the Harmony engine.
        "model_info": {"harmony": True},
    }
    return parse({"model_list": [entry]}, {}).config


def _open(where: Where) -> _OpenEngine:
    config = config_of(where)
    pool = build_pool(config, ModelRegistry(config))
    pool.start()
    return _OpenEngine(build_engine(pool), pool)


class Site:
    """Engines on their own event loop, for callers on a different loop or without a loop."""

    def __init__(self) -> None:
        self._start()
        if hasattr(os, "register_at_fork"):
            # After a fork, the child process does not have the thread, and open connections belong to the parent.
            os.register_at_fork(after_in_child=self._start)

    def _start(self) -> None:
        self.loop = OwnLoop()
        self.engines = Engines()

    def close(self) -> None:
        """Close every engine and stop the thread. Engines and thread restart at the next use."""
        if not self.loop.submit:
            return
        closing = self.loop.run(self.engines.aclose())
        with suppress(TimeoutError):
            closing.result(CLOSING_S)
        self.loop.close()
