"""Queue in front of a group of deployments: order of slots, waiting and refusal.

The queue serves its owners (keys) in turn, and the requests of one owner in their order, so that no owner blocks the
others. Requests that continue an answer which a client is already reading come first. The first request that gets no
slot reserves the deployments that it waits for, so that later, smaller requests cannot starve it. The length of the
queue is limited: when the queue is full, the newest request of the owner with the most waiting requests is refused.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Final, Generic, TypeVar

from unisono.core.error_texts import seconds
from unisono.core.frozen import dataclass
from unisono.errors import BackendOverloaded, ShareExceeded

SlotT = TypeVar("SlotT")

# Number of recently assigned slots from which the speed of the queue is estimated.
RATE_SAMPLES: Final = 64
# Bounds of the suggested `retry_after_s`.
MIN_RETRY_AFTER_S: Final = 1.0
MAX_RETRY_AFTER_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class SlotOffer(Generic[SlotT]):
    """Result of an attempt to reserve a slot: a slot, or a mask of deployments to wait for.

    Without a slot and with an empty mask, no deployment is worth waiting for, and the request has to choose again.
    """

    slot: SlotT | None = None
    waits_for: int = 0


@dataclass(eq=False, slots=True)
class Waiter(Generic[SlotT]):
    """Request in the queue.

    `attempt` tries to reserve a free slot. Its argument is the mask of deployments that other requests wait for.
    """

    owner: str
    number: int
    resumes: bool
    attempt: Callable[[int], SlotOffer[SlotT]]
    answer: asyncio.Future[SlotT | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """Limits of a queue.

    `length` is the maximum number of waiting requests, and `per_owner` the maximum for one owner (None for no limit).
    `timeout_s` is the maximum waiting time in seconds.
    """

    length: int = 256
    per_owner: int | None = None
    timeout_s: float = 60.0


class WaitingQueue(Generic[SlotT]):
    """Fair queue for slots. `give_back` releases the slot of a request that no longer waits."""

    def __init__(self, bounds: QueueConfig, give_back: Callable[[SlotT], None], clock: Callable[[], float]) -> None:
        self._bounds = bounds
        self._give_back = give_back
        self._clock = clock
        self._resuming: deque[Waiter[SlotT]] = deque()
        # Waiting requests by owner; the owner that is served next is first.
        self._owners: OrderedDict[str, deque[Waiter[SlotT]]] = OrderedDict()
        self._waiting = 0
        self._numbers = 0
        self._moved: deque[float] = deque(maxlen=RATE_SAMPLES)
        self._serving = False
        self._must_serve_again = False

    def __len__(self) -> int:
        """Number of waiting requests."""
        return self._waiting + len(self._resuming)

    def number(self) -> int:
        """Return a new number. A request that rejoins the queue with its number keeps its position."""
        self._numbers += 1
        return self._numbers

    async def wait_for_slot(
        self, owner: str, number: int, attempt: Callable[[int], SlotOffer[SlotT]], *, resumes: bool, until: float
    ) -> SlotT | None:
        """Wait for a slot; return None if no deployment is worth waiting for.

        `attempt` tries to reserve a slot, as in `Waiter`. `resumes` means that the request continues an answer. `until`
        is a time of the event loop. Raises BackendOverloaded if no slot becomes free by this time or if the queue is
        full, and its subclass ShareExceeded if this owner has too many waiting requests. If the wait is cancelled, no
        slot stays reserved.
        """
        if not len(self):
            offer = attempt(0)
            if offer.slot is not None or not offer.waits_for:
                return self.grant(offer.slot)
        waiter = Waiter(owner, number, resumes, attempt)
        limit_s = max(0.0, until - asyncio.get_running_loop().time())
        self._join(waiter)
        try:
            self.serve()
            if not waiter.answer.done() and not resumes:
                self._shorten(waiter)
            async with asyncio.timeout_at(until):
                return await waiter.answer
        except TimeoutError:
            # The slot may have been assigned in the same iteration of the event loop in which the time passed.
            if waiter.answer.done() and not waiter.answer.cancelled() and waiter.answer.exception() is None:
                return waiter.answer.result()
            raise BackendOverloaded(
                f"No slot became free for this model within {seconds(limit_s)}; try again later. The operator can add "
                "a deployment, or raise `unisono.queue_timeout_s`.",
                retry_after_s=self.expected_s(),
            ) from None
        except asyncio.CancelledError:
            answer = waiter.answer
            # A slot that was assigned before the cancellation would never be returned.
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                held = answer.result()
                if held is not None:
                    self._give_back(held)
            raise
        finally:
            self._leave(waiter)

    def serve(self) -> None:
        """Assign free slots. Call it whenever a slot is returned or a deployment recovers."""
        # An attempt may give a slot back, which calls this method again. The flag avoids the recursion.
        if self._serving:
            self._must_serve_again = True
            return
        self._serving = True
        try:
            while len(self) and (self._serve_one() or self._must_serve_again):
                self._must_serve_again = False
        finally:
            self._serving = False

    def expected_s(self) -> float:
        """Estimate the seconds until a new request gets a slot, from the recent speed of the queue."""
        if len(self._moved) < 2:
            return MIN_RETRY_AFTER_S
        each = (self._clock() - self._moved[0]) / len(self._moved)
        return min(max(each * (len(self) + 1), MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def _serve_one(self) -> bool:
        """Answer one waiting request; return False if none can be answered."""
        barred = 0
        for waiter in self._by_fairness():
            offer = waiter.attempt(barred)
            if offer.slot is None and offer.waits_for:
                # A request behind this one must not get a slot on a deployment that this one waits for.
                barred |= offer.waits_for
                continue
            self._leave(waiter)
            if waiter.owner in self._owners:
                self._owners.move_to_end(waiter.owner)
            waiter.answer.set_result(self.grant(offer.slot))
            return True
        return False

    def grant(self, held: SlotT | None) -> SlotT | None:
        """Record that a request gets the slot `held`, and return it; do nothing if `held` is None."""
        if held is not None:
            self._moved.append(self._clock())
        return held

    def _by_fairness(self) -> Iterator[Waiter[SlotT]]:
        yield from [waiter for waiter in self._resuming if not waiter.answer.done()]
        lines = [list(line) for line in self._owners.values()]
        for place in range(max(map(len, lines), default=0)):
            for line in lines:
                if place < len(line) and not line[place].answer.done():
                    yield line[place]

    def _join(self, waiter: Waiter[SlotT]) -> None:
        if waiter.resumes:
            line = self._resuming
        else:
            line = self._owners.setdefault(waiter.owner, deque())
            self._waiting += 1
        index = next((place for place, other in enumerate(line) if other.number > waiter.number), len(line))
        line.insert(index, waiter)

    def _leave(self, waiter: Waiter[SlotT]) -> None:
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

    def _shorten(self, newcomer: Waiter[SlotT]) -> None:
        """Refuse one request, possibly the newcomer, if the queue exceeds one of its limits."""
        line = self._owners[newcomer.owner]
        if self._bounds.per_owner is not None and len(line) > self._bounds.per_owner:
            self._refuse(line[-1], shared=True)
        elif self._waiting > self._bounds.length:
            # If several owners have equally many requests, a request of the newcomer's owner is refused.
            greediest = max(self._owners.values(), key=lambda one: (len(one), one is line))
            self._refuse(greediest[-1], shared=len(self._owners) > 1)

    def _refuse(self, waiter: Waiter[SlotT], *, shared: bool) -> None:
        wait_s = self.expected_s()
        self._leave(waiter)
        if waiter.answer.done():
            # The request has just been cancelled, because its client disconnected.
            return
        error = (
            ShareExceeded(
                "Too many requests of this key are waiting for this model; try again later.", retry_after_s=wait_s
            )
            if shared
            else BackendOverloaded(
                "Too many requests are waiting for this model; try again later.", retry_after_s=wait_s
            )
        )
        waiter.answer.set_exception(error)
