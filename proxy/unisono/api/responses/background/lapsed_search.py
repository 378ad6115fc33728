"""Search for abandoned background responses.

The process that ran such a response no longer renews its watch in the store. Every process searches, even one whose
clients never use the Responses API. This module therefore imports nothing else of that API.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from unisono.api.error_responses import failure_of
from unisono.core.state_store import BackgroundRun, Store
from unisono.core.tasks import cancel_and_wait
from unisono.errors import StoreUnavailable

# Maximum time between two searches, in seconds.
SEARCH_INTERVAL_S = 1.0
# Responses per search. A full page is followed by another search without a pause.
PAGE_SIZE = 16

log = logging.getLogger("unisono.responses")


class LapsedSearch:
    """Periodic search for abandoned responses in `store`; every process runs one.

    `take_over` is called with the responses that were found. It returns False if this process has no room for all of
    these responses.
    """

    def __init__(
        self, store: Store, lease_s: float, take_over: Callable[[Sequence[BackgroundRun]], Awaitable[bool]]
    ) -> None:
        self._store = store
        self._interval_s = min(lease_s / 2, SEARCH_INTERVAL_S)
        self._take_over = take_over
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="search for abandoned responses")

    async def aclose(self) -> None:
        await cancel_and_wait(self._task)

    async def _run(self) -> None:
        while True:
            more = False
            try:
                lapsed = await self._store.lapsed(PAGE_SIZE)
                more = bool(lapsed) and await self._take_over(lapsed) and len(lapsed) == PAGE_SIZE
            except StoreUnavailable as error:
                log.debug("search for abandoned responses failed", extra={"code": error.code})
            except Exception as error:
                log.warning("search for abandoned responses failed", extra={"code": failure_of(error).code})
            if not more:
                await asyncio.sleep(self._interval_s)
