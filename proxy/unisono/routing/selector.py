"""Selection of a candidate within one group, with estimates of all prefix caches.

The gateway and `unisono simulate` use this module. The clock is an argument.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from unisono.core.route_protocol import RouteRequirements
from unisono.routing.deployment_choice import (
    Candidate,
    Choice,
    SelectionRequest,
    Share,
    Strategy,
    choose,
    to_selection_request,
)
from unisono.routing.prefix_index import PrefixIndex

log = logging.getLogger(__name__)


class Selector:
    """Selection among `candidates`. Each candidate has its own bit in the masks of `prefixes`.

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
        self, demand: RouteRequirements, now: float, *, sticky: str = "", excluded: int = 0, ruled_out: int = 0
    ) -> SelectionRequest:
        if self._has_one_candidate or self._strategy is not Strategy.PREFIX_AWARE:
            return to_selection_request(demand, excluded=excluded, ruled_out=ruled_out)
        held = self._prefixes.cached_prefixes(demand.blocks, now)
        return to_selection_request(demand, held, sticky=sticky, excluded=excluded, ruled_out=ruled_out, gathers=True)

    def choose(self, selection: SelectionRequest, barred: int = 0) -> Choice:
        return choose(self.candidates, selection, self._rotation, strategy=self._strategy, barred=barred)

    def reserve(
        self, candidate: Candidate, demand: RouteRequirements, selection: SelectionRequest, now: float
    ) -> Share:
        """Reserve a slot on a candidate, and record that the candidate will have cached the prompt."""
        if log.isEnabledFor(logging.DEBUG):
            rows = explained(self.candidates, selection)
            log.debug("backend chosen", extra={"model": self._model, "backend": candidate.name, "candidates": rows})
        if not self._has_one_candidate:
            self._prefixes.record(demand.blocks, candidate.bit, now)
        return candidate.reserve(selection, now)

    def passed(self, selection: SelectionRequest) -> None:
        """Advance the round-robin after a slot was reserved, unless this was a failover."""
        if not selection.excluded & ~selection.ruled_out:
            self._rotation += 1


def explained(candidates: Sequence[Candidate], selection: SelectionRequest) -> list[Mapping[str, object]]:
    """Return, for the log, the values of each candidate on which a choice depends."""
    return [
        {
            "backend": c.name,
            "rank": c.rank.name.lower().replace("_", "-"),
            "order": c.order,
            "weight": c.weight,
            "excluded": bool(c.bit & selection.excluded),
            "room": c.has_room(selection.tokens),
            "running": c.running,
            "work": c.work,
            "foreign": c.foreign,
            "held": selection.known(c.bit),
        }
        for c in candidates
    ]
