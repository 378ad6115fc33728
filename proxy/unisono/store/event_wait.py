"""Waiting for new log events: writers wake readers in their own process; other readers poll."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from unisono.core.state_store import EventPage

# Polling interval in seconds: the maximum delay of events from a writer in another process.
POLL_INTERVAL_S = 1.0


class Waiting:
    """Readers in this process that wait for new events, grouped by the key of the log.

    A writer calls `wake` after each write to a log. `key in waiting` is True while the log has waiting readers.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}

    @contextmanager
    def on(self, key: str) -> Iterator[asyncio.Event]:
        woken = asyncio.Event()
        self._waiting.setdefault(key, set()).add(woken)
        try:
            yield woken
        finally:
            others = self._waiting[key]
            others.discard(woken)
            if not others:
                del self._waiting[key]

    def wake(self, key: str) -> None:
        for woken in self._waiting.get(key, ()):
            woken.set()

    def wake_all(self) -> None:
        for key in self._waiting:
            self.wake(key)

    def __contains__(self, key: str) -> bool:
        return key in self._waiting


async def until_some(
    read: Callable[[], Awaitable[EventPage | None]], woken: asyncio.Event, wait_s: float
) -> EventPage | None:
    """Call `read` until it returns events, until the log has ended, or for `wait_s` seconds.

    Writers in this process set `woken`. Returns the last page, or None if `read` finds no log.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while True:
        # Clear the event before the read, so that a write during the read ends the following wait at once.
        woken.clear()
        page = await read()
        remaining_s = deadline - loop.time()
        if page is None or page.events or page.ended or remaining_s <= 0:
            return page
        try:
            # A lost notification delays events by one interval at most.
            async with asyncio.timeout(min(remaining_s, POLL_INTERVAL_S)):
                await woken.wait()
        except TimeoutError:
            continue
