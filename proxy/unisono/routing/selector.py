"""Selection within one group: its candidates, their estimated caches, and round-robin.

Both serving and simulation use this module; the clock is an argument.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from unisono.core.route_protocol import RouteRequirements
from unisono.routing.policy import (
    Candidate,
    Choice,
    SelectionRequest,
    Share,
    Strategy,
    choose,
    explained,
    to_selection_request,
)
from unisono.routing.prefix_index import PrefixIndex

log = logging.getLogger(__name__)


class Selector:
    """Selection among `candidates`, which have their own bits in `prefixes`.

    `now` is monotonic seconds.
    """

    def __init__(self, model: str, candidates: Sequence[Candidate], prefixes: PrefixIndex, strategy: Strategy) -> None:
        self.candidates = candidates
        self._model = model
        self._prefixes = prefixes
        self._strategy = strategy
        self._rotation = 0
        self._has_one_candidate = len(candidates) < 2

    def selection_request(
        self, demand: RouteRequirements, now: float, *, sticky: str = "", excluded: int = 0
    ) -> SelectionRequest:
        if self._has_one_candidate or self._strategy is not Strategy.PREFIX_AWARE:
            return to_selection_request(demand, excluded=excluded)
        held = self._prefixes.cached_prefixes(demand.blocks, now)
        return to_selection_request(demand, held, sticky=sticky, excluded=excluded, gathers=True)

    def choose(self, selection: SelectionRequest, barred: int = 0) -> Choice:
        return choose(self.candidates, selection, self._rotation, strategy=self._strategy, barred=barred)

    def reserve(
        self, candidate: Candidate, demand: RouteRequirements, selection: SelectionRequest, now: float
    ) -> Share:
        """Take a slot on a candidate, and record that it will hold the prompt."""
        if log.isEnabledFor(logging.DEBUG):
            rows = explained(self.candidates, selection)
            log.debug("backend chosen", extra={"model": self._model, "backend": candidate.name, "candidates": rows})
        if not self._has_one_candidate:
            self._prefixes.record(demand.blocks, candidate.bit, now)
        return candidate.reserve(selection, now)

    def passed(self, selection: SelectionRequest) -> None:
        """Advance the round-robin after a choice became a slot. Failover does not advance it."""
        if not selection.excluded:
            self._rotation += 1
