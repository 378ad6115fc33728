"""Strategies of `router_settings.routing_strategy`, run by the gateway's own selector.

The prefix index is local to the simulation. In reality, backends also report requests of other clients. The simulation
has no other clients, so it does not model such reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

from unisono.core.route_protocol import RouteRequirements
from unisono.routing.deployment_choice import Candidate, Rank, Share, Strategy
from unisono.routing.deployment_rate_limits import rate_of
from unisono.routing.prefix_index import PrefixIndex
from unisono.routing.selector import Selector
from unisono.simulation.plan import BackendPlan, SimulationPlan
from unisono.simulation.run import PlacementRequest
from unisono.simulation.traffic import US


class Serving:
    """Placement strategy that uses the gateway's selector.

    With `sticky`, requests name their conversation, as in the Responses API. Otherwise only their prompts identify it.
    """

    def __init__(self, strategy: Strategy, backends: Sequence[BackendPlan], *, sticky: bool = False) -> None:
        self._sticky = sticky
        self._prefixes = PrefixIndex()
        self.candidates = [
            Candidate(
                backend.name,
                bit=self._prefixes.join(),
                weight=backend.weight,
                order=backend.order,
                max_requests=backend.max_parallel_requests,
                max_tokens=backend.max_tokens_in_flight,
                rate=rate_of(backend.rpm, backend.tpm),
            )
            for backend in backends
        ]
        self._rates = [candidate.rate for candidate in self.candidates if candidate.rate is not None]
        self._selector = Selector("simulated", self.candidates, self._prefixes, strategy)
        self._index = {candidate.bit: index for index, candidate in enumerate(self.candidates)}
        self._shares: dict[PlacementRequest, Share] = {}
        # Number of tokens of the request that was refused last.
        self._refused = 0

    def choose(self, wish: PlacementRequest, now_us: int) -> int | None:
        now = now_us / US
        for rate in self._rates:
            rate.move(now)
        demand = RouteRequirements(wish.prompt, wish.blocks)
        selection = self._selector.selection_request(demand, now, sticky=str(wish.conversation) if self._sticky else "")
        candidate = self._selector.choose(selection).candidate
        if candidate is None or candidate.rank is not Rank.HEALTHY:
            self._refused = selection.tokens
            return None
        self._selector.passed(selection)
        self._shares[wish] = self._selector.reserve(candidate, demand, selection, now)
        return self._index[candidate.bit]

    def record_first_token(self, wish: PlacementRequest, backend: int) -> None:
        self._shares[wish].record_first_token()

    def release(self, wish: PlacementRequest, backend: int, used: int, now_us: int) -> None:
        share = self._shares.pop(wish)
        share.record_usage(used)
        share.give_back(now_us / US)

    def next_free_us(self, now_us: int) -> int | None:
        at = [ceil(rate.frees_at(self._refused) * US) for rate in self._rates if rate.frees_at(self._refused) > 0]
        return min((one for one in at if one > now_us), default=None)

    def died(self, backend: int, now_us: int) -> None:
        self.candidates[backend].rank = Rank.RESTING
        self._prefixes.forget(self.candidates[backend].bit, now_us / US)

    def restarted(self, backend: int) -> None:
        self.candidates[backend].rank = Rank.HEALTHY


def serving(plan: SimulationPlan) -> Callable[[str, Sequence[BackendPlan]], Serving]:
    """Return a function that creates a strategy from its name and the backends."""
    return lambda name, backends: Serving(Strategy(name), backends, sticky=plan.traffic.sticky)
