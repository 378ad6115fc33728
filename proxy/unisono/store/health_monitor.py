"""Startup and health monitoring of a store, in parallel with requests that need no state.

If the store cannot be started, the monitor tries again until it succeeds. After that, regular checks detect failures.
The monitor logs one line each time the store becomes unavailable or available. It also logs the warnings that the store
returned when it was started.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from unisono.core.state_store import Store
from unisono.errors import StoreError, StoreUnavailable, UnisonoError

log = logging.getLogger("unisono.store")

# Maximum time in seconds for which the startup of the gateway waits for the first attempt to start the store.
PATIENCE_S = 3.0
# Interval between two attempts to start the store, in seconds.
START_RETRY_S = 2.0
# Interval between two checks of a working store, in seconds. A gateway that writes nothing notices a failure only by
# such a check.
LOOK_S = 2.0

# Separate reason codes for errors that need a specific action by the operator. Keys are the messages that every kind
# of store uses.
REASONS = {"the store is full": "store_full", "the store currently rejects writes": "store_read_only"}


class Upkeep:
    """Monitor that starts `store`, checks it regularly, and closes it.

    `reason` is the error code for readiness reports, empty while the store is usable. The monitor itself does not
    refuse requests. `again_s` is the delay between attempts to start the store, and `look_s` the interval of checks, in
    seconds.
    """

    def __init__(self, store: Store, *, again_s: float = START_RETRY_S, look_s: float = LOOK_S) -> None:
        self._store = store
        self._start_retry_s = again_s
        self._check_interval_s = look_s
        self._task: asyncio.Task[None] | None = None
        self._has_checked = asyncio.Event()
        self._last_logged = ""
        self._is_doubted = asyncio.Event()
        self.reason = StoreUnavailable.code

    async def start(self) -> None:
        """Return once the first attempt has ended, or after `PATIENCE_S`."""
        self._task = asyncio.create_task(self._run(), name="store-upkeep")
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._has_checked.wait()

    def check_now(self) -> None:
        """Check the store immediately, because a write has failed."""
        self._is_doubted.set()

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._store.aclose()

    async def _run(self) -> None:
        up = False
        while True:
            # Clear the event before the check, so that a write that fails during the check causes another check.
            self._is_doubted.clear()
            try:
                if up:
                    await self._store.check()
                else:
                    self._warn(await self._store.start())
                    up = True
            except Exception as error:
                self._on_failure(error)
            else:
                self._on_success()
            self._has_checked.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._start_retry_s if self.reason else self._check_interval_s):
                    await self._is_doubted.wait()

    @staticmethod
    def _warn(warnings: tuple[str, ...]) -> None:
        for warning in warnings:
            log.warning("store: %s", warning)

    def _on_success(self) -> None:
        if self._last_logged:
            log.warning("the store is available again")
        self.reason = self._last_logged = ""

    def _on_failure(self, error: Exception) -> None:
        known = isinstance(error, UnisonoError)
        text = str(error)
        self.reason = REASONS.get(text) or (error.code if isinstance(error, UnisonoError) else StoreError.code)
        # An outage is logged once, not at every check.
        if text == self._last_logged:
            return
        self._last_logged = text
        cause = error.__cause__
        log.error(
            "the store is unavailable; requests that need state are refused until it is available again",
            extra={"reason": text, "cause": "" if cause is None else f"{type(cause).__name__}: {cause}"},
            exc_info=None if known else error,
        )
