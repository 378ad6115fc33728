"""Event loop of a simulation: arrival, placement, queueing and end of requests.

Events are in one heap. Events of the same microsecond are processed in order of insertion, so the result depends only
on the plan.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from unisono.core.route_protocol import BLOCK_TOKENS
from unisono.simulation.engine import SimulatedEngine, SimulatedRun
from unisono.simulation.plan import BackendPlan, SimulationPlan
from unisono.simulation.results import SimulatedEnd, SimulatedRequest, StrategyResult
from unisono.simulation.traffic import US, SimulatedConversation, conversations


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Request for a slot.

    `conversation` is the stickiness key. `prompt` is the length of the prompt in tokens, and `blocks` the numbers of
    its blocks.
    """

    conversation: int
    prompt: int
    blocks: tuple[int, ...]


class PlacementStrategy(Protocol):
    """Selection of backends, which are identified by their index in the plan.

    A strategy belongs to one simulation and remembers its placements. `now_us` never decreases.
    """

    def choose(self, wish: PlacementRequest, now_us: int) -> int | None:
        """Reserve a slot on a healthy backend with capacity and return its index.

        Return None if the request must wait.
        """
        ...

    def record_first_token(self, wish: PlacementRequest, backend: int) -> None:
        """Record the first token: the prompt is in the cache of the backend."""
        ...

    def release(self, wish: PlacementRequest, backend: int, used: int, now_us: int) -> None:
        """Release the slot of a request, which used `used` tokens."""
        ...

    def next_free_us(self, now_us: int) -> int | None:
        """Return when a slot may become free without the end of a request, or None for never.

        The slot must be large enough for the last request that could not be placed.
        """
        ...

    def died(self, backend: int, now_us: int) -> None:
        """Record that a backend has failed. All its slots are released."""
        ...

    def restarted(self, backend: int) -> None: ...


@dataclass(slots=True)
class _Waiting:
    run: SimulatedRun
    key: int


class _Queue:
    """Queue for slots: resumed answers first, then the keys in rotation.

    Requests of the same key are in order of arrival.
    """

    def __init__(self) -> None:
        self.resumes: deque[_Waiting] = deque()
        self._keys: OrderedDict[int, deque[_Waiting]] = OrderedDict()
        self.length = 0

    def join(self, waiting: _Waiting) -> None:
        self._keys.setdefault(waiting.key, deque()).append(waiting)
        self.length += 1

    def leave(self, request: int, key: int) -> bool:
        """Remove a request and return whether it was in the queue."""
        own = self._keys.get(key, deque())
        for index, waiting in enumerate(own):
            if waiting.run.request == request:
                del own[index]
                self._left(key)
                return True
        return False

    def first(self) -> _Waiting | None:
        if self.resumes:
            return self.resumes[0]
        return next(iter(self._keys.values()))[0] if self._keys else None

    def pop(self) -> None:
        """Remove the first request and move its key to the end of the rotation."""
        if self.resumes:
            self.resumes.popleft()
            return
        key = next(iter(self._keys))
        self._keys[key].popleft()
        self._keys.move_to_end(key)
        self._left(key)

    def shorten(self, newcomer: int) -> int:
        """Remove the newest request of the key with the longest queue, and return its number.

        If several keys have equally long queues, the key `newcomer` is preferred.
        """
        key = max(self._keys, key=lambda each: (len(self._keys[each]), each == newcomer))
        removed = self._keys[key].pop()
        self._left(key)
        return removed.run.request

    def _left(self, key: int) -> None:
        self.length -= 1
        if not self._keys[key]:
            del self._keys[key]


def simulate(
    plan: SimulationPlan, strategy: str, make: Callable[[str, Sequence[BackendPlan]], PlacementStrategy]
) -> StrategyResult:
    """Simulate the plan once with the strategy that `make` creates for the name `strategy`."""
    return _Simulation(plan, strategy, make(strategy, expanded(plan.backends))).run()


def expanded(backends: Sequence[BackendPlan]) -> list[BackendPlan]:
    """Return one plan for each backend, with a unique name."""
    return [
        replace(plan, count=1, name=plan.name if plan.count == 1 else f"{plan.name}-{number}")
        for plan in backends
        for number in range(1, plan.count + 1)
    ]


class _Simulation:
    def __init__(self, plan: SimulationPlan, name: str, strategy: PlacementStrategy) -> None:
        self._plan = plan
        self._name = name
        self._strategy = strategy
        self._backends = expanded(plan.backends)
        self._engines = [SimulatedEngine(each) for each in self._backends]
        # Number of active outages, by backend.
        self._down = [0] * len(self._backends)
        self._line = _Queue()
        self._conversations = conversations(plan)
        self._requests: list[SimulatedRequest] = []
        # Conversation and step of each unfinished request.
        self._steps: dict[int, tuple[int, int]] = {}
        # Backend and placement request of each request with a slot.
        self._placements: dict[int, tuple[int, PlacementRequest]] = {}
        self._heap: list[tuple[int, int, Callable[[int], None]]] = []
        self._serial = 0
        self._last_us = 0
        # Time of the next scheduled check of the queue.
        self._next_fill_us = -1

    def run(self) -> StrategyResult:
        for index, backend in enumerate(self._backends):
            for outage in backend.down:
                self._schedule(round(outage.at_s * US), self._crash(index))
                self._schedule(round((outage.at_s + outage.for_s) * US), self._restart(index))
        for talk in self._conversations:
            self._schedule(talk.starts_us, self._send_request(talk, 0))
        while self._heap:
            now, _, happen = heapq.heappop(self._heap)
            happen(now)
        return StrategyResult(
            self._name,
            self._requests,
            [each.name for each in self._backends],
            [engine.busy_us for engine in self._engines],
            self._last_us,
        )

    def _schedule(self, when: int, happen: Callable[[int], None]) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (when, self._serial, happen))

    # Events

    def _send_request(self, talk: SimulatedConversation, number: int) -> Callable[[int], None]:
        def happen(now: int) -> None:
            step = talk.steps[number]
            request = len(self._requests)
            self._requests.append(SimulatedRequest(talk.key, now, step.output))
            self._steps[request] = (talk.number, number)
            run = SimulatedRun(request, step.prompt, step.output, step.blocks)
            waiting = _Waiting(run, talk.key)
            if self._line.first() is None and self._place(waiting, now):
                return
            self._line.join(waiting)
            self._fill_in_time(now)
            self._schedule(now + round(self._plan.queue_timeout_s * US), self._queue_timeout(request, talk.key))
            if self._line.length > self._plan.max_queue:
                self._refuse(self._line.shorten(talk.key), SimulatedEnd.FULL, now)

        return happen

    def _queue_timeout(self, request: int, key: int) -> Callable[[int], None]:
        def happen(now: int) -> None:
            if request in self._steps and request not in self._placements and self._line.leave(request, key):
                self._refuse(request, SimulatedEnd.LATE, now)
                # Later requests in the queue may fit although this one did not.
                self._place_waiting(now)

        return happen

    def _engine_step(self, index: int, version: int) -> Callable[[int], None]:
        def happen(now: int) -> None:
            engine = self._engines[index]
            if engine.version != version:
                return
            first, done = engine.advance(now)
            for run in first:
                self._on_first_token(run, now)
            for run in done:
                self._finished(run, index, now)
            self._next(index)
            if done:
                self._place_waiting(now)

        return happen

    def _crash(self, index: int) -> Callable[[int], None]:
        def happen(now: int) -> None:
            self._down[index] += 1
            for run in self._engines[index].fail(now):
                self._release(run.request, run.prompt, now)
                served = self._requests[run.request]
                served.moved += 1
                fresh = replace(run, cached=0, at=0.0)
                self._line.resumes.append(_Waiting(fresh, served.key))
            self._strategy.died(index, now)
            self._place_waiting(now)

        return happen

    def _restart(self, index: int) -> Callable[[int], None]:
        def happen(now: int) -> None:
            self._down[index] -= 1
            if not self._down[index]:
                self._strategy.restarted(index)
                self._place_waiting(now)

        return happen

    # Queue and slots

    def _place_waiting(self, now: int) -> None:
        while (waiting := self._line.first()) is not None and self._place(waiting, now):
            self._line.pop()
        if waiting is not None:
            self._fill_in_time(now)

    def _fill_in_time(self, now: int) -> None:
        """Schedule a check of the queue for the time at which a rate limit permits another request."""
        frees = self._strategy.next_free_us(now)
        if frees is not None and (self._next_fill_us <= now or frees < self._next_fill_us):
            self._next_fill_us = frees
            self._schedule(frees, self._place_waiting)

    def _place(self, waiting: _Waiting, now: int) -> bool:
        run = waiting.run
        talk, _ = self._steps[run.request]
        wish = PlacementRequest(talk, run.prompt, run.blocks[: run.prompt // BLOCK_TOKENS])
        chosen = self._strategy.choose(wish, now)
        if chosen is None:
            return False
        if self._down[chosen]:
            raise ValueError(
                f"the strategy {self._name} chose the backend {self._backends[chosen].name}, which is down"
            )
        self._placements[run.request] = (chosen, wish)
        served = self._requests[run.request]
        if served.placed_us < 0:
            served.placed_us = now
        self._engines[chosen].admit(now, run)
        self._next(chosen)
        return True

    def _next(self, index: int) -> None:
        engine = self._engines[index]
        due = engine.due()
        if due is not None:
            self._schedule(due, self._engine_step(index, engine.version))

    def _on_first_token(self, run: SimulatedRun, now: int) -> None:
        served = self._requests[run.request]
        served.prompt += run.prompt
        served.cached += run.cached
        if served.first_us < 0:
            served.first_us = now
            served.entered_us = run.entered_us
        backend, wish = self._placements[run.request]
        self._strategy.record_first_token(wish, backend)

    def _finished(self, run: SimulatedRun, index: int, now: int) -> None:
        served = self._requests[run.request]
        served.ended_us, served.backend, served.end = now, index, SimulatedEnd.DONE
        self._last_us = now
        self._release(run.request, run.tokens, now)
        talk, number = self._steps.pop(run.request)
        steps = self._conversations[talk].steps
        if number + 1 < len(steps):
            self._schedule(now + steps[number + 1].pause_us, self._send_request(self._conversations[talk], number + 1))

    def _release(self, request: int, used: int, now: int) -> None:
        index, wish = self._placements.pop(request)
        self._strategy.release(wish, index, used, now)

    def _refuse(self, request: int, end: SimulatedEnd, now: int) -> None:
        """Refuse a request.

        The client leaves, and the remaining steps of its conversation are dropped.
        """
        served = self._requests[request]
        served.ended_us, served.end = now, end
        del self._steps[request]
