"""Simple strategies, to compare the simulation with theory and with each other."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.route_protocol import BLOCK_TOKENS
from unisono.simulation.plan import BackendPlan
from unisono.simulation.run import PlacementRequest

# Assumed output tokens of a request.
ASSUMED_OUTPUT_TOKENS = 500


class RoundRobin:
    """Choose the backends in turn."""

    def __init__(self, backends: Sequence[BackendPlan]) -> None:
        self._backends = backends
        self._turn = -1
        self._up = [True] * len(backends)
        self.requests = [0] * len(backends)
        self.tokens = [0] * len(backends)

    def choose(self, wish: PlacementRequest, now_us: int) -> int | None:
        tokens = wish.prompt + ASSUMED_OUTPUT_TOKENS
        free = [index for index in range(len(self._backends)) if self._up[index] and self._has_room(index, tokens)]
        if not free:
            return None
        index = self.best(wish, free)
        self.requests[index] += 1
        self.tokens[index] += tokens
        return index

    def best(self, wish: PlacementRequest, free: Sequence[int]) -> int:
        self._turn += 1
        return free[self._turn % len(free)]

    def record_first_token(self, wish: PlacementRequest, backend: int) -> None:
        """Check that the backend is up."""
        assert self._up[backend]

    def next_free_us(self, now_us: int) -> int | None:
        return None

    def release(self, wish: PlacementRequest, backend: int, used: int, now_us: int) -> None:
        self.requests[backend] -= 1
        self.tokens[backend] -= wish.prompt + ASSUMED_OUTPUT_TOKENS

    def died(self, backend: int, now_us: int) -> None:
        assert self.requests[backend] == self.tokens[backend] == 0
        self._up[backend] = False

    def restarted(self, backend: int) -> None:
        self._up[backend] = True

    def _has_room(self, index: int, tokens: int) -> bool:
        plan = self._backends[index]
        if plan.max_parallel_requests is not None and self.requests[index] >= plan.max_parallel_requests:
            return False
        limit = plan.max_tokens_in_flight
        return limit is None or not self.requests[index] or self.tokens[index] + tokens <= limit


class LeastBusy(RoundRobin):
    """Choose the backend with the fewest requests for its weight."""

    def best(self, wish: PlacementRequest, free: Sequence[int]) -> int:
        return min(free, key=lambda index: (self.requests[index] / self._backends[index].weight, index))


class LeastWork(RoundRobin):
    """Choose the backend with the fewest tokens of work; a cached prefix does not count."""

    def __init__(self, backends: Sequence[BackendPlan]) -> None:
        super().__init__(backends)
        self._cached: list[set[int]] = [set() for _ in backends]

    def best(self, wish: PlacementRequest, free: Sequence[int]) -> int:
        def work(index: int) -> tuple[float, int]:
            cached_blocks = self._cached[index]
            cached = next((i for i, block in enumerate(wish.blocks) if block not in cached_blocks), len(wish.blocks))
            fresh = wish.prompt - cached * BLOCK_TOKENS
            return (self.tokens[index] + fresh) / self._backends[index].weight, index

        best = min(free, key=work)
        self._cached[best].update(wish.blocks)
        return best

    def died(self, backend: int, now_us: int) -> None:
        super().died(backend, now_us)
        self._cached[backend].clear()
