"""The line before a group of deployments: who gets the next place, who waits, and who is sent away.

Owners take turns and the requests of one owner keep their order, so nobody waits for all that somebody else asked for.
What goes on with an answer that a client is already reading comes before all of them. The first in turn who cannot have
a place keeps everybody behind off the deployments it waits for, so that a large request is not passed by small ones for
ever. The line is bounded: when it is full, the newest request of whoever has most in it has to go.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from unisono.errors import BackendOverloaded, ShareExceeded

Held = TypeVar("Held")

RATE_OVER: Final = 64
"""So many of the last places tell how fast the line moves."""
SHORTEST_S: Final = 1.0
LONGEST_S: Final = 30.0
"""Bounds of what a client is told to wait, in seconds."""


@dataclass(frozen=True, slots=True)
class SlotOffer(Generic[Held]):
    """What an attempt brought: a place, or a mask of deployments that it is worth to wait for; with neither there is
    nothing to wait for, and whoever waits has to look around again."""

    held: Held | None = None
    waits_for: int = 0


@dataclass(eq=False, slots=True)
class Waiter(Generic[Held]):
    """One request in line. `attempt` takes a place now if there is one besides those of a mask."""

    owner: str
    number: int
    resumes: bool
    attempt: Callable[[int], SlotOffer[Held]]
    answer: asyncio.Future[Held | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """Of a line: how many may wait in it, of one owner too, and for how many seconds."""

    length: int = 256
    per_owner: int | None = None
    timeout_s: float = 60.0


class WaitingQueue(Generic[Held]):
    """`give_back` undoes a place that nobody came for."""

    def __init__(self, bounds: QueueConfig, give_back: Callable[[Held], None], clock: Callable[[], float]) -> None:
        self._bounds = bounds
        self._give_back = give_back
        self._clock = clock
        self._resuming: deque[Waiter[Held]] = deque()
        self._owners: OrderedDict[str, deque[Waiter[Held]]] = OrderedDict()
        """Those who wait, by owner; the owner whose turn it is comes first."""
        self._waiting = 0
        self._numbers = 0
        self._moved: deque[float] = deque(maxlen=RATE_OVER)
        self._serving = False
        self._again = False

    def __len__(self) -> int:
        """Requests in line."""
        return self._waiting + len(self._resuming)

    def number(self) -> int:
        """What a request keeps its turn by when it leaves the line to look around."""
        self._numbers += 1
        return self._numbers

    async def take(
        self, owner: str, number: int, attempt: Callable[[int], SlotOffer[Held]], *, resumes: bool, until: float
    ) -> Held | None:
        """A place, by `until` (the event loop's time), or None when there is nothing to wait for. Raises
        BackendOverloaded and its relatives; cancelled at any moment nothing is held."""
        if not len(self):
            offer = attempt(0)
            if offer.held is not None or not offer.waits_for:
                return self._taken(offer.held)
        waiter = Waiter(owner, number, resumes, attempt)
        self._join(waiter)
        try:
            self.serve()
            if not waiter.answer.done() and not resumes:
                self._shorten(waiter)
            async with asyncio.timeout_at(until):
                return await waiter.answer
        except TimeoutError:
            if waiter.answer.done() and not waiter.answer.cancelled() and waiter.answer.exception() is None:
                return waiter.answer.result()
            raise BackendOverloaded(
                "No place became free for this model in time.", retry_after_s=self.expected_s()
            ) from None
        except asyncio.CancelledError:
            answer = waiter.answer
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                held = answer.result()
                if held is not None:
                    self._give_back(held)
            raise
        finally:
            self._leave(waiter)

    def serve(self) -> None:
        """Give out what is free: whenever a place was given back, or a deployment is well again."""
        if self._serving:
            self._again = True
            return
        self._serving = True
        try:
            while len(self) and (self._serve_one() or self._again):
                self._again = False
        finally:
            self._serving = False

    def expected_s(self) -> float:
        """How long a newcomer should stay away, by how fast places became free of late, in seconds."""
        if len(self._moved) < 2:
            return SHORTEST_S
        each = (self._clock() - self._moved[0]) / len(self._moved)
        return min(max(each * (len(self) + 1), SHORTEST_S), LONGEST_S)

    def _serve_one(self) -> bool:
        """One waiter gets its answer; False when there is nothing for anybody."""
        barred = 0
        for waiter in self._in_turn():
            offer = waiter.attempt(barred)
            if offer.held is None and offer.waits_for:
                barred |= offer.waits_for
                continue
            self._leave(waiter)
            if waiter.owner in self._owners:
                self._owners.move_to_end(waiter.owner)
            waiter.answer.set_result(self._taken(offer.held))
            return True
        return False

    def _taken(self, held: Held | None) -> Held | None:
        if held is not None:
            self._moved.append(self._clock())
        return held

    def _in_turn(self) -> Iterator[Waiter[Held]]:
        yield from [waiter for waiter in self._resuming if not waiter.answer.done()]
        lines = [list(line) for line in self._owners.values()]
        for place in range(max(map(len, lines), default=0)):
            for line in lines:
                if place < len(line) and not line[place].answer.done():
                    yield line[place]

    def _join(self, waiter: Waiter[Held]) -> None:
        if waiter.resumes:
            line = self._resuming
        else:
            line = self._owners.setdefault(waiter.owner, deque())
            self._waiting += 1
        behind = next((place for place, other in enumerate(line) if other.number > waiter.number), len(line))
        line.insert(behind, waiter)

    def _leave(self, waiter: Waiter[Held]) -> None:
        if waiter.resumes:
            if waiter in self._resuming:
                self._resuming.remove(waiter)
            return
        line = self._owners.get(waiter.owner)
        if line is None or waiter not in line:
            return
        line.remove(waiter)
        self._waiting -= 1
        if not line:
            del self._owners[waiter.owner]

    def _shorten(self, newcomer: Waiter[Held]) -> None:
        """Send somebody away if the line is longer than it may be."""
        line = self._owners[newcomer.owner]
        if self._bounds.per_owner is not None and len(line) > self._bounds.per_owner:
            self._refuse(line[-1], shared=True)
        elif self._waiting > self._bounds.length:
            # Of those that are as greedy, the newcomer.
            greediest = max(self._owners.values(), key=lambda one: (len(one), one is line))
            self._refuse(greediest[-1], shared=len(self._owners) > 1)

    def _refuse(self, waiter: Waiter[Held], *, shared: bool) -> None:
        wait_s = self.expected_s()
        self._leave(waiter)
        if waiter.answer.done():
            # Its client went away just now.
            return
        error = (
            ShareExceeded("Too many of your requests are waiting for this model.", retry_after_s=wait_s)
            if shared
            else BackendOverloaded("Too many requests are waiting for this model.", retry_after_s=wait_s)
        )
        waiter.answer.set_exception(error)
