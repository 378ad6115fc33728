"""Bringing a store up and watching it, beside a gateway that serves whatever needs no state meanwhile.

A store that is not there when the gateway starts is tried until it is; one that goes away later is noticed. Each change
is logged once, and what the store warns of is logged when it has come up.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from unisono.core.state_store import Store
from unisono.errors import StoreError, StoreUnavailable, UnisonoError

log = logging.getLogger("unisono.store")

PATIENCE_S = 3.0
"""How long a start waits for the first try to end."""
AGAIN_S = 2.0
"""Between two tries to bring it up."""
LOOK_S = 10.0
"""Between two looks at a store that works."""

REASONS = {"the store is full": "store_full", "the store takes no writes at the moment": "store_read_only"}
"""Reasons of their own, by the words that every kind of store has for them: an operator does something else then."""


class Upkeep:
    """Starts `store` and closes it. `reason` says why it cannot be used, as a code; empty while it can."""

    def __init__(self, store: Store, *, again_s: float = AGAIN_S, look_s: float = LOOK_S) -> None:
        self._store = store
        self._again_s = again_s
        self._look_s = look_s
        self._task: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._said = ""
        self._is_doubted = asyncio.Event()
        self.reason = StoreUnavailable.code

    async def start(self) -> None:
        """Return once the store was tried, or is taking its time."""
        self._task = asyncio.create_task(self._keep(), name="store-upkeep")
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._tried.wait()

    def look_now(self) -> None:
        """Check the store at once: a write has failed."""
        self._is_doubted.set()

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._store.aclose()

    async def _keep(self) -> None:
        up = False
        while True:
            self._is_doubted.clear()
            try:
                if up:
                    await self._store.check()
                else:
                    self._warn(await self._store.start())
                    up = True
            except Exception as error:
                self._fails(error)
            else:
                self._works()
            self._tried.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._again_s if self.reason else self._look_s):
                    await self._is_doubted.wait()

    @staticmethod
    def _warn(warnings: tuple[str, ...]) -> None:
        for warning in warnings:
            log.warning("store: %s", warning)

    def _works(self) -> None:
        if self._said:
            log.warning("the store can be used again")
        self.reason = self._said = ""

    def _fails(self, error: Exception) -> None:
        known = isinstance(error, UnisonoError)
        words = str(error)
        self.reason = REASONS.get(words) or (error.code if isinstance(error, UnisonoError) else StoreError.code)
        if words == self._said:
            return
        self._said = words
        cause = error.__cause__
        log.error(
            "the store cannot be used; requests that need state are refused until it can be",
            extra={"reason": words, "cause": "" if cause is None else f"{type(cause).__name__}: {cause}"},
            exc_info=None if known else error,
        )
