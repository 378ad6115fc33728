"""Background responses of a gateway. The modules that run them are imported on first use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING

from unisono.api.responses.background.lapsed_search import LapsedSearch
from unisono.core.state_store import BackgroundRun, Store

if TYPE_CHECKING:
    from unisono.api.responses.background.runner import BackgroundRunner


class BackgroundResponses:
    """Background responses of a gateway: their runner, and the search for abandoned responses.

    A response is abandoned if the process that ran it no longer renews its lease. `build` imports the modules of the
    runner and returns a runner. The argument of `build` is True if the gateway is closing; then the runner must not
    start any response. `build` is called in a thread, when the first request to the Responses API arrives or the first
    abandoned response is found.
    """

    def __init__(self, store: Store, lease_s: float, build: Callable[[bool], BackgroundRunner]) -> None:
        self._build = build
        self._search = LapsedSearch(store, lease_s, self._take_over)
        self._lock = Lock()
        self._runner: BackgroundRunner | None = None
        self._is_closing = False

    def runner(self) -> BackgroundRunner:
        """Return the runner, and build it on the first call. Safe to call in any thread."""
        with self._lock:
            if self._runner is None:
                self._runner = self._build(self._is_closing)
            return self._runner

    def start(self) -> None:
        """Start the search for abandoned responses."""
        self._search.start()

    async def stop_search(self) -> None:
        """Stop taking over responses. Responses that run in this process continue."""
        await self._search.aclose()

    def tasks(self) -> set[asyncio.Task[None]]:
        """Return the tasks of the responses that are running."""
        return set() if self._runner is None else self._runner.tasks()

    async def aclose(self, grace_s: float = 0.0) -> None:
        """Stop all responses, so that other processes take them over.

        Running tool calls get `grace_s` seconds to finish.
        """
        self._is_closing = True
        await self.stop_search()
        # Wait for a thread that may be building the runner at this moment.
        with self._lock:
            runner = self._runner
        if runner is not None:
            await runner.aclose(grace_s)

    async def _take_over(self, lapsed: Sequence[BackgroundRun]) -> bool:
        return await (await asyncio.to_thread(self.runner)).take_over_lapsed(lapsed)
