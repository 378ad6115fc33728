"""Fair queue for calls to one server: limited concurrency, round-robin over waiting owners.

One owner with many calls cannot starve the others.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class NoSlot(Exception):
    """A call got no slot at its server, because the queue was full or the deadline has passed."""


class FairQueue:
    """Queue for `places` concurrent calls, with at most `waiting` queued calls for each owner."""

    def __init__(self, places: int, waiting: int) -> None:
        self._free = places
        self._max_waiting = waiting
        # Waiting calls by owner. An owner whose call got a slot moves to the end.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        # Calls that hold a slot or wait for one.
        self.users = 0

    @asynccontextmanager
    async def slot(self, owner: str, until: float) -> AsyncIterator[None]:
        """Hold a slot in this context; calls of the same `owner` get slots in order of arrival.

        Raises `NoSlot` if the owner's queue is full, or if no slot is free by `until` (time of the event loop).
        """
        self.users += 1
        try:
            await self._enter(owner, until)
            try:
                yield
            finally:
                self._pass_on()
        finally:
            self.users -= 1

    async def _enter(self, owner: str, until: float) -> None:
        if self._free and not self._waiting:
            self._free -= 1
            return
        count = len(self._waiting.get(owner, ()))
        if count >= self._max_waiting:
            raise NoSlot(
                f"{count} calls of this client are waiting for this tool server, which is the limit. Try again later."
            )
        admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(admission)
        try:
            async with asyncio.timeout_at(until):
                await admission
        except BaseException as error:
            if admission.done() and not admission.cancelled():
                # The slot was granted at the moment of cancellation: pass it on.
                self._pass_on()
            else:
                self._forget(owner, admission)
            if isinstance(error, TimeoutError):
                raise NoSlot("The tool server was busy until the call's deadline. Try again later.") from None
            raise

    def _pass_on(self) -> None:
        """Pass the slot to the longest-waiting call of the next owner."""
        while self._waiting:
            owner, queue = self._waiting.popitem(last=False)
            admission = queue.popleft()
            if queue:
                self._waiting[owner] = queue
            if not admission.done():
                admission.set_result(None)
                return
        self._free += 1

    def _forget(self, owner: str, admission: asyncio.Future[None]) -> None:
        queue = self._waiting.get(owner)
        if queue is not None and admission in queue:
            queue.remove(admission)
            if not queue:
                del self._waiting[owner]
