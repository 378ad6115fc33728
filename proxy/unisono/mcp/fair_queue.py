"""Who calls one server next: so many at once, and of those who wait each owner in turn, so that one who wants much does
not keep the others waiting."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class NoSlot(Exception):
    """No place at a server became free in time."""


class FairQueue:
    """For `places` calls at once; of each owner at most `waiting` more wait."""

    def __init__(self, places: int, waiting: int) -> None:
        self._free = places
        self._most_waiting = waiting
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By owner; whoever had a turn goes to the end."""
        self.users = 0
        """Calls that have a place or wait for one."""

    @asynccontextmanager
    async def place(self, owner: str, until: float) -> AsyncIterator[None]:
        """A place, in order of arrival among the calls of `owner`. Raises `NoSlot`, at `until` (loop time) at the
        latest."""
        self.users += 1
        try:
            await self._enter(owner, until)
            try:
                yield
            finally:
                self._leave()
        finally:
            self.users -= 1

    async def _enter(self, owner: str, until: float) -> None:
        if self._free and not self._waiting:
            self._free -= 1
            return
        mine = self._waiting.setdefault(owner, deque())
        if len(mine) >= self._most_waiting:
            raise NoSlot("Too many calls wait for this tool server.")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        mine.append(turn)
        try:
            async with asyncio.timeout_at(until):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                # The place came at the very moment it was no longer wanted.
                self._leave()
            else:
                self._forget(owner, turn)
            if isinstance(error, TimeoutError):
                raise NoSlot("The tool server was busy until it was too late.") from None
            raise

    def _leave(self) -> None:
        """Give the place to whoever waits first of the owner whose turn it is."""
        while self._waiting:
            owner, mine = self._waiting.popitem(last=False)
            turn = mine.popleft()
            if mine:
                self._waiting[owner] = mine
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _forget(self, owner: str, turn: asyncio.Future[None]) -> None:
        mine = self._waiting.get(owner)
        if mine is not None and turn in mine:
            mine.remove(turn)
            if not mine:
                del self._waiting[owner]
