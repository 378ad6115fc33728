"""Queueing model of one backend: continuous batching, chunked prefill, LRU prompt cache.

Chunks of prefill alternate with steps of decoding. The speeds are constant between two events, so that the progress can
be computed. All answers of a batch grow at the same rate, and prompts are read one after the other.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from unisono.core.route_protocol import BLOCK_TOKENS
from unisono.simulation.plan import BackendPlan
from unisono.simulation.traffic import US

# Tokens of prefill between two decoding steps.
CHUNK = 2048
# Part of a token that is treated as zero, because sums have rounding errors.
NEARLY = 1e-6


@dataclass(slots=True)
class SimulatedRun:
    """Generation of one request on a backend.

    `output` is the number of tokens still to be generated. `done` is the number of tokens that were generated on
    earlier backends.
    """

    request: int
    prompt: int
    output: int
    blocks: tuple[int, ...]
    done: int = 0
    cached: int = 0
    # Time in microseconds when the backend admitted the request to the batch; -1 before.
    entered_us: int = -1
    first_us: int = -1
    # Value of the batch's token counter at the first token of this answer.
    at: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt + self.output


class Cache:
    """LRU cache of prompt blocks with a maximum number of blocks."""

    def __init__(self, blocks: int) -> None:
        self._max_blocks = blocks
        self._blocks: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def longest_prefix(self, blocks: Iterable[int]) -> int:
        """Return how many of the leading blocks are cached."""
        length = 0
        for block in blocks:
            if block not in self._blocks:
                break
            length += 1
        return length

    def use(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._blocks.pop(block, None)
            self._blocks[block] = None
        over = len(self._blocks) - self._max_blocks
        if over > 0:
            for block in list(self._evict(over)):
                del self._blocks[block]

    def _evict(self, count: int) -> Iterable[int]:
        oldest = iter(self._blocks)
        return (next(oldest) for _ in range(count))

    def clear(self) -> None:
        self._blocks.clear()


class SimulatedEngine:
    """Simulated backend. All times are in microseconds."""

    def __init__(self, plan: BackendPlan) -> None:
        self._plan = plan
        self.cache = Cache(plan.cache_tokens // BLOCK_TOKENS if plan.prefix_cache else 0)
        self.busy_us = 0
        # Incremented whenever the next event may have changed.
        self.version = 0
        self._waiting: deque[SimulatedRun] = deque()
        self._prefilling: deque[SimulatedRun] = deque()
        # Tokens of the first prompt that are still to be read.
        self._unread_tokens = 0.0
        self._decoding: list[tuple[float, int, SimulatedRun]] = []
        self._written = 0.0
        self._reserved_tokens = 0
        self._moment = 0
        single = 1.0 / plan.decode_tps
        full = plan.max_batch / plan.decode_total
        self._step_s = single
        self._step_extra_s = max(full - single, 0.0) / max(plan.max_batch - 1, 1)

    def __len__(self) -> int:
        """Return the number of requests on the backend, waiting ones included."""
        return len(self._waiting) + self.running

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def admit(self, now: int, run: SimulatedRun) -> None:
        self._progress(now)
        self._waiting.append(run)
        self._admit(now)
        self.version += 1

    def due(self) -> int | None:
        """Return the time of the next event if no request arrives, or None if the backend is idle."""
        reads, writes = self._rates()
        waits = []
        if self._prefilling:
            waits.append(self._unread_tokens / reads)
        if self._decoding:
            waits.append((self._decoding[0][0] - self._written) / writes)
        # At least one microsecond, so that time advances.
        return self._moment + max(1, math.ceil(min(waits) * US)) if waits else None

    def advance(self, now: int) -> tuple[list[SimulatedRun], list[SimulatedRun]]:
        """Advance to the time `now`. Return two lists of generations.

        The first list contains the generations whose first token was generated, the second those that have finished.
        """
        self._progress(now)
        first: list[SimulatedRun] = []
        done: list[SimulatedRun] = []
        while self._decoding and self._decoding[0][0] <= self._written + NEARLY:
            done.append(heapq.heappop(self._decoding)[2])
        if self._prefilling and self._unread_tokens <= NEARLY:
            run = self._prefilling.popleft()
            if run.first_us < 0:
                run.first_us = now
            first.append(run)
            run.at = self._written
            self.cache.use(run.blocks[: run.prompt // BLOCK_TOKENS])
            if run.output <= 1:
                done.append(run)
            else:
                heapq.heappush(self._decoding, (self._written + run.output - 1, run.request, run))
            self._prefill_next()
        for run in done:
            self._reserved_tokens -= run.tokens
            self.cache.use(run.blocks)
        self._admit(now)
        self.version += 1
        return first, done

    def fail(self, now: int) -> list[SimulatedRun]:
        """Return all generations that the failure interrupts, with their progress. Clears the cache."""
        self._progress(now)
        lost = [*self._waiting, *self._prefilling]
        for _, _, run in self._decoding:
            written = min(int(self._written - run.at) + 1, run.output - 1)
            run.done += written
            run.prompt += written
            run.output -= written
            lost.append(run)
        self._waiting.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._unread_tokens, self._reserved_tokens = 0.0, 0
        self.cache.clear()
        self.version += 1
        return sorted(lost, key=lambda run: run.request)

    def _admit(self, now: int) -> None:
        """Admit waiting requests while batch size and memory permit.

        A single request is always admitted.
        """
        while self._waiting and self.running < self._plan.max_batch:
            run = self._waiting[0]
            if self.running and self._reserved_tokens + run.tokens > self._plan.cache_tokens:
                return
            self._waiting.popleft()
            self._reserved_tokens += run.tokens
            if run.entered_us < 0:
                run.entered_us = now
            self._prefilling.append(run)
            if len(self._prefilling) == 1:
                self._prefill_next()

    def _prefill_next(self) -> None:
        if not self._prefilling:
            return
        run = self._prefilling[0]
        # The last block of a fully cached prompt is computed again, because a step needs input.
        known = run.blocks[: (run.prompt - 1) // BLOCK_TOKENS]
        cached = self.cache.longest_prefix(known)
        self.cache.use(known[:cached])
        run.cached = cached * BLOCK_TOKENS
        self._unread_tokens = float(run.prompt - run.cached)

    def _rates(self) -> tuple[float, float]:
        """Return the current speeds of prefill and decoding, in tokens per second.

        The first speed is that of the one prompt being read, the second that of each answer being generated.
        """
        reads = self._plan.prefill_tps
        if not self._decoding:
            return reads, 0.0
        step = self._step_s + self._step_extra_s * (len(self._decoding) - 1)
        if not self._prefilling:
            return reads, 1.0 / step
        step += CHUNK / reads
        return CHUNK / step, 1.0 / step

    def _progress(self, now: int) -> None:
        """Advance the current prefill and all answers to the time `now`."""
        passed = now - self._moment
        if passed > 0:
            reads, writes = self._rates()
            if self._prefilling:
                self._unread_tokens -= reads * passed / US
            if self._decoding:
                self._written += writes * passed / US
            if self._prefilling or self._decoding:
                self.busy_us += passed
        self._moment = now
