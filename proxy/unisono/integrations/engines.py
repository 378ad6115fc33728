"""Engines for a process that is not the gateway's: each over one backend, all on one loop in a thread of its own.

So they serve callers without a loop, and callers on any loop, however often those are made and closed. An engine is
built when it is first asked for; those that nobody asked for the longest are closed where there are too many.
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

from unisono.app import build_engine
from unisono.bootstrap.backends import build_pool
from unisono.config import Config, ModelRegistry, parse
from unisono.engine.turn import GenerationService
from unisono.routing.pool import RoutingPool

T = TypeVar("T")

MOST: Final = 64
"""Engines that are kept while nothing runs on them."""
CLOSING_S: Final = 10.0
"""How long closing all of it may take, in seconds."""


class OwnLoop:
    """A loop in a daemon thread, begun when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def begun(self) -> bool:
        return self._loop is not None

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """`work`, begun there. Cancelling the future cancels it."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="unisono", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End the thread; what runs there ends nowhere. It begins anew when it is needed again."""
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
    """A backend: `model` is `<backend kind>/<the backend's own name for the model>`."""

    model: str
    api_base: str | None = None
    api_key: str | None = field(default=None, repr=False)


@dataclass(eq=False, slots=True)
class _Kept:
    turns: GenerationService
    pool: RoutingPool
    running: int = 0


class Engines:
    """Lives on one loop: nothing here is safe to use from two threads."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._kept: dict[Where, _Kept] = {}

    @asynccontextmanager
    async def at(self, where: Where) -> AsyncIterator[GenerationService]:
        """The engine over that backend, which is kept for as long as somebody is in here. Raises ConfigError."""
        kept = self._kept.pop(where, None) or _built(where)
        # The one that was asked for last stands last.
        self._kept[where] = kept
        kept.running += 1
        try:
            yield kept.turns
        finally:
            kept.running -= 1
            await self._close_idle()

    async def aclose(self) -> None:
        kept, self._kept = list(self._kept.values()), {}
        for one in kept:
            await one.pool.aclose()

    async def _close_idle(self) -> None:
        idle = [where for where, kept in self._kept.items() if not kept.running]
        for where in idle[: max(0, len(self._kept) - self._most)]:
            await self._kept.pop(where).pool.aclose()


def config_of(where: Where) -> Config:
    """Raises ConfigError."""
    params = {"model": where.model, "api_base": where.api_base, "api_key": where.api_key}
    entry = {
        "model_name": where.model,
        "litellm_params": {name: value for name, value in params.items() if value is not None},
        # Whoever asks here has said so.
        "model_info": {"harmony": True},
    }
    return parse({"model_list": [entry]}, {}).config


def _built(where: Where) -> _Kept:
    config = config_of(where)
    pool = build_pool(config, ModelRegistry(config))
    pool.start()
    return _Kept(build_engine(pool), pool)


class Site:
    """Engines on a loop of their own, for whoever is on another one or on none."""

    def __init__(self) -> None:
        self._begin()
        if hasattr(os, "register_at_fork"):
            # No thread goes along, and what is open is the parent's.
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self.loop = OwnLoop()
        self.engines = Engines()

    def close(self) -> None:
        """Close every engine and end the thread. All of it begins anew when it is needed again."""
        if not self.loop.begun:
            return
        closing = self.loop.run(self.engines.aclose())
        with suppress(TimeoutError):
            closing.result(CLOSING_S)
        self.loop.close()
