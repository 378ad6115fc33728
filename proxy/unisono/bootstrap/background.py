"""Background responses of a gateway. Their modules are imported at the first use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING

from unisono.api.responses.background.takeover import LapsedSearch
from unisono.core.state_store import BackgroundRun, Store

if TYPE_CHECKING:
    from unisono.api.responses.background.runner import BackgroundRunner


class BackgroundResponses:
    """Runner of background responses, and the search for those that other processes abandoned.

    `build` imports the modules of the runner and returns it. Its argument is True if the gateway is closing, so that
    the runner must not run jobs. It is called in a thread, for the first request to the Responses API or for the first
    abandoned response.
    """

    def __init__(self, store: Store, lease_s: float, build: Callable[[bool], BackgroundRunner]) -> None:
        self._build = build
        self._search = LapsedSearch(store, lease_s, self._take_over)
        self._lock = Lock()
        self._runner: BackgroundRunner | None = None
        self._is_closing = False

    def runner(self) -> BackgroundRunner:
        """Return the runner; safe to call in any thread."""
        with self._lock:
            if self._runner is None:
                self._runner = self._build(self._is_closing)
            return self._runner

    def start(self) -> None:
        """Start the search."""
        self._search.start()

    async def aclose(self, grace_s: float = 0.0) -> None:
        """Hand over every response to other processes; running tool calls get `grace_s` seconds."""
        self._is_closing = True
        await self._search.aclose()
        # A thread may be building the runner.
        with self._lock:
            runner = self._runner
        if runner is not None:
            await runner.aclose(grace_s)

    async def _take_over(self, lapsed: Sequence[BackgroundRun]) -> bool:
        return await (await asyncio.to_thread(self.runner)).take_over_lapsed(lapsed)
