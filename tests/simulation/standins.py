"""Strategies of a few lines, to hold the model against theory and against each other."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.core.prefix_blocks import BLOCK_TOKENS
from unisono.simulation.plan import BackendPlan
from unisono.simulation.run import PlacementRequest

OUTPUT = 500
"""What an answer is taken for."""


class Turns:
    """One after the other."""

    def __init__(self, backends: Sequence[BackendPlan]) -> None:
        self._backends = backends
        self._turn = -1
        self._up = [True] * len(backends)
        self.requests = [0] * len(backends)
        self.tokens = [0] * len(backends)

    def choose(self, wish: PlacementRequest, now_us: int) -> int | None:
        tokens = wish.prompt + OUTPUT
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
        """Only those that are up begin."""
        assert self._up[backend]

    def next_free_us(self, now_us: int) -> int | None:
        return None

    def release(self, wish: PlacementRequest, backend: int, used: int, now_us: int) -> None:
        self.requests[backend] -= 1
        self.tokens[backend] -= wish.prompt + OUTPUT

    def died(self, backend: int, now_us: int) -> None:
        assert self.requests[backend] == self.tokens[backend] == 0
        self._up[backend] = False

    def restarted(self, backend: int) -> None:
        self._up[backend] = True

    def _has_room(self, index: int, tokens: int) -> bool:
        plan = self._backends[index]
        if plan.max_parallel_requests is not None and self.requests[index] >= plan.max_parallel_requests:
            return False
        most = plan.max_tokens_in_flight
        return most is None or not self.requests[index] or self.tokens[index] + tokens <= most


class Least(Turns):
    """The one with the fewest requests."""

    def best(self, wish: PlacementRequest, free: Sequence[int]) -> int:
        return min(free, key=lambda index: (self.requests[index] / self._backends[index].weight, index))


class Work(Turns):
    """The one with the least work, of which a known prefix is none."""

    def __init__(self, backends: Sequence[BackendPlan]) -> None:
        super().__init__(backends)
        self._held: list[set[int]] = [set() for _ in backends]

    def best(self, wish: PlacementRequest, free: Sequence[int]) -> int:
        def work(index: int) -> tuple[float, int]:
            held = self._held[index]
            known = next((i for i, block in enumerate(wish.blocks) if block not in held), len(wish.blocks))
            fresh = wish.prompt - known * BLOCK_TOKENS
            return (self.tokens[index] + fresh) / self._backends[index].weight, index

        best = min(free, key=work)
        self._held[best].update(wish.blocks)
        return best

    def died(self, backend: int, now_us: int) -> None:
        super().died(backend, now_us)
        self._held[backend].clear()
