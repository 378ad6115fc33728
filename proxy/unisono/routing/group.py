"""Deployments of one model name and their queue; reserves slots one request at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import cached_property
from typing import Final

from unisono.core.answer_faults import AnswerFault
from unisono.core.frozen import dataclass
from unisono.core.route_protocol import RouteRequirements
from unisono.errors import BackendError, BackendOverloaded
from unisono.routing.canary import Canaries, draw_of, masks
from unisono.routing.circuit_breaker import BreakerConfig
from unisono.routing.deployment import LiveDeployment, SlotReservation
from unisono.routing.deployment_choice import Choice, Rank, SelectionRequest, Strategy
from unisono.routing.hedge import HedgeBudget, HedgeRules
from unisono.routing.prefix_index import PrefixIndex
from unisono.routing.quality import QualityLevel, quality_of
from unisono.routing.queue import QueueConfig, SlotOffer, WaitingQueue
from unisono.routing.retries import RetryBudget
from unisono.routing.selector import Selector
from unisono.routing.tags import TagRules

REFUSALS_LOGGED_EVERY_S: Final = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoutingRules:
    """Routing rules of every group.

    `num_retries` is the maximum number of attempts after the first one, before any output is emitted. If `tags` is
    None, the tags of requests are ignored. With `is_by_quality`, the quality of the answers changes the weights of
    deployments. If `hedge` is None, no request is sent to a second deployment while the first deployment is silent.
    """

    strategy: Strategy = Strategy.PREFIX_AWARE
    bounds: QueueConfig = field(default_factory=QueueConfig)
    tolerance: BreakerConfig = field(default_factory=BreakerConfig)
    num_retries: int = 2
    tags: TagRules | None = None
    is_by_quality: bool = False
    hedge: HedgeRules | None = None


class DeploymentGroup:
    """Deployments of one model. Each member has a bit of its own in the masks of `prefixes`."""

    def __init__(
        self,
        model: str,
        members: Sequence[LiveDeployment],
        prefixes: PrefixIndex,
        rules: RoutingRules | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.members = tuple(members)
        self.rules = rules or RoutingRules()
        self.budget = RetryBudget(clock())
        self.line: WaitingQueue[SlotReservation] = WaitingQueue(self.rules.bounds, _give_back, clock)
        self._prefixes = prefixes
        self.now = self._clock = clock
        self._candidates = [live.candidate for live in self.members]
        self._choosing = Selector(model, self._candidates, prefixes, self.rules.strategy)
        self.by_bit: Mapping[int, LiveDeployment] = {live.candidate.bit: live for live in self.members}
        # Deployments with a rate limit per minute.
        self._rated: list[LiveDeployment] = []
        # Timer that serves the queue when the minute of a rate limit is over.
        self._minute: asyncio.TimerHandle | None = None
        self.hedges = HedgeBudget()
        self._news: set[asyncio.Future[None]] = set()
        self._refused = 0
        self._refusal_logged_at = float("-inf")

    @property
    def in_flight(self) -> int:
        """Number of requests of the group that have a slot or wait for one."""
        number = len(self.line)
        for candidate in self._candidates:
            number += candidate.running
        return number

    @property
    def knows_caches(self) -> bool:
        """True if the group estimates for each deployment which part of a prompt is cached."""
        return len(self.members) > 1 and self.rules.strategy is Strategy.PREFIX_AWARE

    @property
    def longest_answer_s(self) -> float:
        """Longest time limit for a whole answer among the members, in seconds."""
        longest_s = 0.0
        for live in self.members:
            longest_s = max(longest_s, live.timeouts.total_s)
        return longest_s

    def listen(self, live: LiveDeployment) -> None:
        """Subscribe to changes of a member, such as freed slots."""
        live.listeners.append(self._changed)
        if live.candidate.rate is not None:
            self._rated.append(live)

    def close(self) -> None:
        """Unsubscribe from the members, which may belong to another group by now."""
        for live in self.members:
            if self._changed in live.listeners:
                live.listeners.remove(self._changed)
        if self._minute is not None:
            self._minute.cancel()

    def selection_request(
        self, demand: RouteRequirements, sticky: str, excluded: int, ruled_out: int = 0, drawn: float = 1.0
    ) -> SelectionRequest:
        """Return the properties of a request from which a deployment is chosen.

        `excluded` and `ruled_out` are masks, as in `SelectionRequest`. `sticky` identifies the conversation; "" if
        unknown. `drawn` is a random number from 0 to 1, which decides whether the request goes to a canary.
        """
        selection = self._choosing.selection_request(
            demand, self._clock(), sticky=sticky, excluded=excluded, ruled_out=ruled_out
        )
        if not self._canaries:
            return selection
        preferred, avoided = masks(self._canaries, draw_of(sticky, drawn))
        return replace(selection, preferred=preferred, avoided=avoided)

    @cached_property
    def _canaries(self) -> Canaries:
        """Canaries of the group.

        They are determined at the first request, because members may get their configuration after the group is
        created.
        """
        return [(live.candidate.bit, live.terms.canary_share) for live in self.members if live.terms.canary_share]

    def choice(self, selection: SelectionRequest, barred: int = 0) -> Choice:
        self._refresh()
        return self._choosing.choose(selection, barred)

    def serves(self, selection: SelectionRequest) -> bool:
        """Return whether a deployment of good or unknown health supports the request.

        The deployment may have no free slot, but its rate limit must not be used up.
        """
        self._refresh()
        return any(
            one.rank < Rank.HALF_OPEN
            and not one.bit & selection.excluded
            and one.can(selection)
            and (one.rate is None or one.rate.has_room(selection.tokens))
            for one in self._candidates
        )

    def unfit(self, selection: SelectionRequest) -> LiveDeployment | None:
        """Return an unfit, but not drained, deployment to probe again as a last resort."""
        unfit = (one for one in self.members if one.candidate.rank is Rank.UNFIT and not one.terms.is_withdrawn)
        return next((one for one in unfit if not one.candidate.bit & selection.excluded), None)

    def drained_last_resort(self, ruled_out: int) -> LiveDeployment | None:
        """Return a drained deployment for an answer that began before the drain.

        `ruled_out` is the mask of deployments that the request does not permit. None if a permitted deployment of good
        or unknown health can answer instead, or if no permitted deployment is drained.
        """
        self._refresh()
        if any(one.rank < Rank.HALF_OPEN and not one.bit & ruled_out for one in self._candidates):
            return None
        drained = (live for live in self.members if live.terms.is_drained and not live.candidate.bit & ruled_out)
        return min(drained, key=lambda live: live.failure is not None, default=None)

    def _refresh(self) -> None:
        now = self._clock()
        for live in self.members:
            if live.circuits:
                live.refresh(now)
        for live in self._rated:
            if (rate := live.candidate.rate) is not None:
                rate.move(now)

    def attempt(
        self, demand: RouteRequirements, selection: SelectionRequest, barred: int = 0
    ) -> SlotOffer[SlotReservation]:
        """Reserve a slot now, if a deployment with known capabilities has a free slot.

        Otherwise return the mask of deployments to wait for, which is 0 if waiting is useless. Slots of the deployments
        in the mask `barred` belong to other requests.
        """
        choice = self.choice(selection, barred)
        if choice.candidate is None:
            self._serve_in_time(selection, choice.waits_for)
            return SlotOffer(None, choice.waits_for)
        live = self.by_bit[choice.candidate.bit]
        if live.known is None:
            return SlotOffer()
        self._choosing.passed(selection)
        return SlotOffer(self.reserve(live, demand, selection))

    def reserve(self, live: LiveDeployment, demand: RouteRequirements, selection: SelectionRequest) -> SlotReservation:
        """Reserve a slot on a deployment, and record that it will have the prompt in its cache."""
        return live.hold(self._choosing.reserve(live.candidate, demand, selection, self._clock()))

    def reserve_other(self, live: LiveDeployment, demand: RouteRequirements, excluded: int) -> SlotReservation | None:
        """Reserve a slot for a hedged request on another deployment with the same capabilities.

        Return None if there is no such slot, if requests wait in the queue, or if the hedge budget is used up.
        `excluded` is the mask of the deployments that must not be used.
        """
        if len(self.line):
            return None
        selection = self.selection_request(demand, "", excluded | live.candidate.bit)
        choice = self.choice(selection).candidate
        if choice is None or choice.rank is not Rank.HEALTHY:
            return None
        other = self.by_bit[choice.bit]
        if other.known != live.known or not self.hedges.pay():
            return None
        other.hedges += 1
        return self.reserve(other, demand, selection)

    def free_slot(self, demand: RouteRequirements, selection: SelectionRequest) -> SlotReservation | None:
        """Reserve a slot now; return None if no slot is free, or if requests wait in the queue."""
        return None if len(self.line) else self.line.grant(self.attempt(demand, selection).slot)

    async def wait_for(
        self, owner: str, number: int, demand: RouteRequirements, selection: SelectionRequest, until: float
    ) -> SlotReservation | None:
        """Wait in the queue for a slot; return None if no deployment is worth waiting for.

        `owner` identifies the key of the request, because the queue serves keys in turn. `number` determines the
        position among the owner's requests. `until` is a time of the event loop. Raises BackendOverloaded if no slot
        becomes free by this time or if the queue is full.
        """
        try:
            return await self.line.wait_for_slot(
                owner,
                number,
                lambda barred: self.attempt(demand, selection, barred),
                resumes=demand.resumes,
                until=until,
            )
        except BackendOverloaded as error:
            # The time depends only on deployments that the request can use, not on drained deployments, for example.
            if frees_in := self._frees_in(selection, self.choice(selection).waits_for):
                error.retry_after_s = max(error.retry_after_s or 0.0, frees_in)
            self._log_refusal(error)
            raise

    def _frees_in(self, selection: SelectionRequest, mask: int) -> float:
        """Return the seconds until the rate limits allow a request on a deployment in `mask`.

        Return 0 if one of the deployments has no rate limit, or has room now.
        """
        rates = [one.rate for one in self._candidates if one.bit & mask]
        at = [rate.frees_at(selection.tokens) for rate in rates if rate is not None]
        return max(min(at) - self._clock(), 0.0) if at and len(at) == len(rates) else 0.0

    def _serve_in_time(self, selection: SelectionRequest, mask: int) -> None:
        """Schedule a timer that serves the queue when a rate limit has room again.

        The timer is needed because the end of a rate limit's minute triggers no event.
        """
        at = [
            live.candidate.rate.frees_at(selection.tokens)
            for live in self._rated
            if live.candidate.rate is not None and live.candidate.bit & mask
        ]
        now = self._clock()
        if not (later := [one for one in at if one > now]):
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + min(later) - now
        if self._minute is not None:
            if not self._minute.cancelled() and self._minute.when() <= when:
                return
            self._minute.cancel()
        self._minute = loop.call_at(when, self._on_minute_end)

    def _on_minute_end(self) -> None:
        self._minute = None
        self._changed()

    async def examined(self, live: LiveDeployment) -> None:
        """Wait until a deployment's capabilities are known, or the state of any member changes.

        Raises a BackendError if the deployment's probe fails.
        """
        probed = asyncio.ensure_future(live.waking.capabilities(live))
        news = asyncio.get_running_loop().create_future()
        self._news.add(news)
        try:
            await asyncio.wait({probed, news}, return_when=asyncio.FIRST_COMPLETED)
            if probed.done():
                probed.result()
        finally:
            self._news.discard(news)
            news.cancel()
            probed.cancel()

    async def knows(self, live: LiveDeployment) -> bool:
        """Return whether the capabilities of a member are known; probe it first if necessary."""
        with suppress(BackendError):
            await live.capabilities()
        return live.known is not None

    def forget(self, live: LiveDeployment) -> None:
        """Mark the deployment's prefix cache as lost, because its process died or was replaced."""
        self._prefixes.forget(live.candidate.bit, self._clock())

    def record_answer(self, live: LiveDeployment, faults: Collection[AnswerFault], workload: int) -> None:
        """Record an answer of a member, and sometimes compare the member's quality with the others."""
        quality = live.quality
        if not quality.record(faults, workload, self._clock()):
            return
        if quality.compare([other.quality for other in self.members if other is not live]):
            live.apply_weight()
            about = quality_of(quality, is_weighted=True)
            log.log(
                logging.INFO if quality.level is QualityLevel.FULL else logging.WARNING,
                "backend quality changed",
                extra={"backend": live.name, "weight": about.weight, "faulty_per_thousand": about.faulty_per_thousand},
            )

    def _changed(self) -> None:
        for news in self._news:
            if not news.done():
                news.set_result(None)
        if len(self.line):
            self.line.serve()

    def _log_refusal(self, error: BackendOverloaded) -> None:
        self._refused += 1
        now = self._clock()
        if now - self._refusal_logged_at >= REFUSALS_LOGGED_EVERY_S:
            log.warning(
                "requests refused",
                extra={"model": self.model, "code": error.code, "refused": self._refused, "waiting": len(self.line)},
            )
            self._refused, self._refusal_logged_at = 0, now


def _give_back(hold: SlotReservation) -> None:
    hold.live.give_back(hold)
