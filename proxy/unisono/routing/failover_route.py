"""Failover of one request through the deployments of its model and of the fallback models.

A failed attempt is repeated on another deployment of the group first, and then in another group. If all have failed, a
deployment that failed is retried after a pause. Before the answer begins, `num_retries` limits the retries, and each
retry is charged to the group's retry budget, except for the first move away from a dead deployment. Attempts that
continue an answer are not charged, and MAX_FAILED_ATTEMPTS limits them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import random
from typing import Final

from unisono.core.generation import Capabilities
from unisono.core.route_protocol import Attempt, Prospects, RouteRequest, RouteRequirements
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendRejected,
    BackendUnavailable,
    ContextTooLong,
    UnisonoError,
)
from unisono.routing.circuit_breaker import BreakerFailure, kind_of
from unisono.routing.deployment import LiveDeployment, SlotReservation
from unisono.routing.deployment_choice import Rank, SelectionRequest
from unisono.routing.group import DeploymentGroup
from unisono.routing.held_slot import HeldSlot
from unisono.routing.retries import MAX_RETRY_AFTER_S, retry_pause_s
from unisono.routing.unable_deployments import unable_mask

# Maximum number of failed attempts of an answer that a client is already reading. The limit stops an answer that kills
# every deployment.
MAX_FAILED_ATTEMPTS: Final = 5

# Failures that show that a deployment is out of service. Moving away from it adds no load, because it did no work. If a
# deployment is only too busy or too slow, the next deployment gets additional load.
DEATHS: Final = frozenset({BreakerFailure.UNREACHABLE, BreakerFailure.PROTOCOL, BreakerFailure.ERROR})

# Seconds between two checks for a free slot on a drained deployment.
DRAINED_PAUSE_S: Final = 0.05


class GroupFailoverRoute:
    """Failover of a request through the deployments of `group`, and then of `fallbacks`.

    If the prompt is too long for `group`, the groups in `larger` are tried before the fallbacks. `ruled_out` is the
    mask of deployments that must not be used.
    """

    def __init__(
        self,
        request: RouteRequest,
        group: DeploymentGroup,
        fallbacks: Sequence[DeploymentGroup] = (),
        larger: Sequence[DeploymentGroup] = (),
        ruled_out: int = 0,
    ) -> None:
        self._request = request
        self._group = group
        self._now = group.now
        self._fallbacks = tuple(fallbacks)
        self._larger = tuple(larger)
        self._tries: list[Attempt] = []
        self._failure: UnisonoError | None = None
        if request.excluded:
            for each in (group, *fallbacks, *larger):
                for live in each.members:
                    if live.name in request.excluded:
                        ruled_out |= live.candidate.bit
        # Group and deployment of the last slot. An answer of another process may have begun on a drained deployment.
        drained = group.drained_last_resort(ruled_out) if request.is_taken_over else None
        self._at: tuple[DeploymentGroup, LiveDeployment] | None = None if drained is None else (group, drained)
        self._ruled_out = ruled_out
        self._unable = 0  # mask of deployments that lack a required ability; a part of `_ruled_out`
        self._drawn = random()  # noqa: S311 - nothing secret
        # Mask of deployments that failed or must not be used.
        self._failed_mask = ruled_out
        own = request.requested.num_retries
        self._num_retries = group.rules.num_retries if own is None else own
        # True if the route has one deployment.
        self._is_alone = len(group.members) == 1 and not (fallbacks or larger)
        # Failures that count against `num_retries`, by model.
        self._failures: dict[str, int] = {}
        self._deaths = 0
        self._moved = False  # True after the one free move away from a dead deployment
        self._back = 0  # mask of deployments with a transient failure
        # True if the last slot was for continuing an answer that a client is reading.
        self._resumes = False
        # True if the request has paused since the last failure.
        self._paused = False

    @property
    def tries(self) -> Sequence[Attempt]:
        return self._tries

    @property
    def identity(self) -> str:
        """Identity of the requester, to which failures are attributed."""
        return self._request.identity()

    @property
    def retries_left(self) -> int:
        group = self._group if self._at is None else self._at[0]
        return max(self._num_retries - self._failures.get(group.model, 0), 0)

    def has_alternative(self, prompt_tokens: int) -> bool:
        """Return whether another healthy deployment can hold a prompt of `prompt_tokens` tokens."""
        current, excluded = None, self._failed_mask & ~self._back if self._resumes else self._failed_mask
        if self._at is not None:
            current, excluded = self._at[0], excluded | self._at[1].candidate.bit
        for group in (self._group, *self._fallbacks):
            failures = self._failures.get(group.model, 0) + (group is current)
            # While a client reads the answer, the retry limit does not apply.
            if failures > self._num_retries and not self._resumes:
                continue
            for one in (live.candidate for live in group.members):
                has_room = one.context is None or one.context > prompt_tokens
                if has_room and one.rank < Rank.HALF_OPEN and not one.bit & excluded:
                    return True
        return False

    @property
    def elsewhere(self) -> bool:
        return not (self._is_alone and self._at is not None) and self._another(resumes=self._resumes)

    def prospects(self, error: UnisonoError, *, resumes: bool, held: bool) -> Prospects:
        if self._at is None:
            return Prospects()
        if not held:
            self._deaths += 1
            self._count(self._at[0], error)
        group = self._at[0]
        if not self._may_try_again(group, error, resumes=resumes, pending=held):
            return Prospects()
        later_s = self._pause_s(error, resumes=resumes, pending=held)
        if not held:
            # No available deployment had a free slot.
            return Prospects(later_s=later_s)
        pending = None if isinstance(error, ContextTooLong) else group
        # A deployment whose last probe failed is a last resort, after a retry of the deployment that failed now.
        worst = Rank.UNREADY if later_s is None else Rank.RESTING
        if self._another(resumes=resumes, pending=pending, worst=worst):
            return Prospects(available=True)
        return Prospects(later_s=later_s)

    def retry_failed(self) -> None:
        self._failed_mask &= ~self._back
        self._paused = True

    def _another(self, *, resumes: bool, pending: DeploymentGroup | None = None, worst: Rank = Rank.UNREADY) -> bool:
        """Return whether another deployment of the rank `worst` or better is available.

        `pending` is the group of a failed attempt that is not counted yet, if there is one.
        """
        last = self._at[1].candidate.bit if self._at is not None else 0
        back = self._back if resumes and self._deaths < MAX_FAILED_ATTEMPTS else 0
        for group in (self._group, *self._larger, *self._fallbacks):
            if not resumes and not self._retries_left(group, pending=group is pending):
                continue
            for live in group.members:
                one = live.candidate
                if one.bit & last or one.rank > worst:
                    continue
                if not one.bit & self._failed_mask or one.bit & back:
                    return True
        return False

    def _may_try_again(self, group: DeploymentGroup, error: UnisonoError, *, resumes: bool, pending: bool) -> bool:
        """Return whether another attempt is allowed after an attempt in `group` ended in `error`."""
        if isinstance(error, ContextTooLong):
            return True
        # The continuation of an answer is limited only by the number of failures. A pending failure is not counted yet.
        if resumes:
            return self._deaths + pending <= MAX_FAILED_ATTEMPTS
        # Any other attempt is free, or charged to the retry budget of the group.
        return self._is_free(error) or group.budget.affords(self._now())

    def _is_free(self, error: UnisonoError) -> bool:
        """Return whether an attempt after `error` is not charged to the retry budget."""
        # A server that responds with an error is still alive, so retrying it after a pause is charged.
        kind = kind_of(error)
        return not self._moved and kind in DEATHS and not (self._paused and kind is BreakerFailure.ERROR)

    def _pause_s(self, error: UnisonoError, *, resumes: bool, pending: bool) -> float | None:
        """Return the seconds until a failed deployment may be retried; None if no retry is allowed.

        `resumes` is True if output was already sent, so that a retry would continue the answer. `pending` is True if
        the failure of the current deployment is not yet included in the counts of failures, so it is added here.
        """
        assert self._at is not None
        back = self._back | (self._at[1].candidate.bit if pending and _is_transient(error) else 0)
        groups = (self._group, *self._larger, *self._fallbacks)
        waits = any(
            one.candidate.bit & back and one.candidate.rank is not Rank.UNFIT
            for group in groups
            if self._num_retries and (resumes or self._retries_left(group, pending=pending and group is self._at[0]))
            for one in group.members
        )
        asked_s = error.retry_after_s or 0.0
        if not waits or asked_s > MAX_RETRY_AFTER_S:
            return None
        return retry_pause_s(max(self._deaths + pending - 1, 0), asked_s)

    def _retries_left(self, group: DeploymentGroup, *, pending: bool) -> bool:
        return self._failures.get(group.model, 0) + pending <= self._num_retries

    def _count(self, group: DeploymentGroup, error: UnisonoError) -> None:
        if not isinstance(error, ContextTooLong):
            self._failures[group.model] = self._failures.get(group.model, 0) + 1

    async def next_slot(self, demand: RouteRequirements) -> HeldSlot:
        self._resumes = demand.resumes
        self._exclude_unable(demand)
        if self._failure is None:
            if self._at is None:
                self._group.budget.add_request(self._group.in_flight, self._now())
            elif (place := self._same_deployment(demand) or await self._drained_slot(demand)) is not None:
                return place
        else:
            self._judge(demand)
        refusal: BackendError | None = None
        last_resorts: list[DeploymentGroup] = []
        groups = self._groups(demand)
        for group in groups:
            if len(groups) > 1 and not group.serves(self._selection_request(group, demand)):
                last_resorts.append(group)
                continue
            try:
                return await self._wait_for_slot(group, demand)
            except BackendError as error:
                refusal = refusal or error
        for group in last_resorts:
            try:
                return await self._wait_for_slot(group, demand)
            except BackendError as error:
                refusal = refusal or error
        if self._failure is not None and not isinstance(refusal, BackendOverloaded):
            raise self._failure.with_traceback(None)
        raise refusal or BackendUnavailable("No backend is available for this model; try again later.")

    def record_failure(self, group: DeploymentGroup, live: LiveDeployment, error: UnisonoError) -> None:
        self._tries[-1] = replace(self._tries[-1], failure=error.code)
        self._failure = error
        self._failed_mask |= live.candidate.bit
        if _is_transient(error):
            self._back |= live.candidate.bit
        self._deaths += 1
        self._count(group, error)

    def move(self, group: DeploymentGroup, live: LiveDeployment) -> None:
        self._tries[-1], self._at = Attempt(live.name, model=group.model), (group, live)

    def _judge(self, demand: RouteRequirements) -> None:
        """Pay for another attempt, or raise the last error if no further attempt is allowed."""
        error = self._failure
        assert error is not None
        assert self._at is not None
        if isinstance(error, ContextTooLong):
            return
        if not isinstance(error, BackendError) or isinstance(error, BackendRejected):
            raise error
        if demand.resumes:
            if self._deaths > MAX_FAILED_ATTEMPTS:
                raise error
            return
        group = self._at[0]
        if self._is_free(error) and any(
            one.serves(self._selection_request(one, demand)) for one in self._groups(demand)
        ):
            self._moved = True
        elif not group.budget.pay(self._now()):
            if error.retry_after_s is None:
                error.retry_after_s = group.line.expected_s()
            raise error

    def _exclude_unable(self, demand: RouteRequirements) -> int:
        """Rule out the deployments that lack a required ability; return their mask."""
        larger = self._larger if self._larger and self._is_too_long(demand) else ()
        unable = unable_mask((self._group, *larger, *self._fallbacks), demand, self._ruled_out)
        self._unable |= unable
        self._ruled_out |= unable
        self._failed_mask |= unable
        return unable

    def _groups(self, demand: RouteRequirements) -> list[DeploymentGroup]:
        """Return the groups that may be tried, in order, each once."""
        larger = self._larger if self._larger and self._is_too_long(demand) else ()
        groups: list[DeploymentGroup] = []
        for group in (self._group, *larger, *self._fallbacks):
            if group not in groups and (demand.resumes or self._retries_left(group, pending=False)):
                groups.append(group)
        return groups

    def _is_too_long(self, demand: RouteRequirements) -> bool:
        """Return whether the prompt is too long for the deployments of the requested model."""
        if isinstance(self._failure, ContextTooLong):
            return True
        ruled_out = self._ruled_out & ~self._unable
        usable = (one.candidate for one in self._group.members if not one.candidate.bit & ruled_out)
        sizes = [one.context for one in usable]
        return all(size is not None and size <= demand.prompt_tokens for size in sizes)

    def _selection_request(self, group: DeploymentGroup, demand: RouteRequirements) -> SelectionRequest:
        request = self._request
        wanted = group.selection_request(demand, request.sticky, self._failed_mask, self._ruled_out, self._drawn)
        if demand.resumes and self._at is not None and not group.serves(wanted):
            # Deployments that failed earlier may be healthy again, even if their circuits are open. The deployment that
            # failed last stays excluded, because it failed just now.
            last = self._at[1].candidate.bit if self._failure is not None and not self._paused else 0
            return replace(wanted, excluded=(self._failed_mask & ~self._back) | last)
        return wanted

    def _same_deployment(self, demand: RouteRequirements) -> HeldSlot | None:
        """Return a free slot on the previous deployment, ahead of its queue; None if none is free."""
        assert self._at is not None
        group, live = self._at
        wanted = group.selection_request(demand, self._request.sticky, 0)
        one = live.candidate
        live.refresh(self._now())
        # An answer that began before its deployment was drained or removed may use the deployment until its end.
        is_usable = live.terms.is_drained or live.terms.is_removed or one.rank <= Rank.HALF_OPEN
        if live.known is None or not is_usable or not one.can(wanted) or not one.has_room(wanted.tokens):
            return None
        return self._given(group, group.reserve(live, demand, wanted), live.known, demand)

    async def _drained_slot(self, demand: RouteRequirements) -> HeldSlot | None:
        """Wait for a slot on the drained deployment of this answer, if it is full or not probed yet.

        The group's queue no longer assigns slots of this deployment. Return None if no slot becomes free within the
        queue's time limit, or if another deployment can continue the answer.
        """
        assert self._at is not None
        group, live = self._at
        wanted = group.selection_request(demand, self._request.sticky, 0)
        if not live.terms.is_drained or not await group.knows(live) or not live.candidate.can(wanted):
            return None
        loop = asyncio.get_running_loop()
        until = loop.time() + min(group.rules.bounds.timeout_s, live.timeouts.total_s)
        while live.terms.is_drained and loop.time() < until:
            if (place := self._same_deployment(demand)) is not None:
                return place
            if any(one.serves(self._selection_request(one, demand)) for one in self._groups(demand)):
                return None
            await asyncio.sleep(DRAINED_PAUSE_S)
        return None

    async def _wait_for_slot(self, group: DeploymentGroup, demand: RouteRequirements) -> HeldSlot:
        """Return a slot in a group, waiting in its queue if necessary. Raises a BackendError."""
        wanted = self._selection_request(group, demand)
        hold = group.free_slot(demand, wanted)
        if hold is not None and hold.live.known is not None:
            return self._given(group, hold, hold.live.known, demand)
        number = group.line.number()
        # Waiting longer than an answer may take is useless.
        until = asyncio.get_running_loop().time() + min(group.rules.bounds.timeout_s, group.longest_answer_s)
        error: BackendError | None = None
        examined: tuple[tuple[str, str], ...] = ()
        while True:
            hold = await group.wait_for(self._request.owner, number, demand, wanted, until)
            if hold is not None:
                if hold.live.known is not None:
                    return self._given(group, hold, hold.live.known, demand)
                # The deployment's circuit opened in the meantime.
                hold.live.give_back(hold)
            choice = group.choice(wanted)
            if choice.candidate is None and choice.waits_for:
                continue
            live = group.by_bit[choice.candidate.bit] if choice.candidate else group.unfit(wanted)
            if live is None:
                raise error or BackendUnavailable("No backend is available for this model; try again later.")
            try:
                await group.examined(live)
            except BackendError as failure:
                error = error or failure
                examined += ((live.name, failure.code),)
                error.attempts = examined
                wanted = replace(wanted, excluded=wanted.excluded | live.candidate.bit)
            wanted = replace(wanted, excluded=wanted.excluded | self._exclude_unable(demand))

    def _given(
        self, group: DeploymentGroup, hold: SlotReservation, capabilities: Capabilities, demand: RouteRequirements
    ) -> HeldSlot:
        live = hold.live
        if not self._tries or self._failure is not None or self._at is None or self._at[1] is not live:
            self._tries.append(Attempt(live.name, model=group.model))
        self._failure, self._paused = None, False
        self._at = (group, live)
        return HeldSlot(self, group, hold, capabilities, demand, self._failed_mask)


def _is_transient(error: UnisonoError) -> bool:
    """Return whether the deployment that failed may serve the same request after a pause."""
    return kind_of(error) is not None and not (isinstance(error, BackendError) and error.permanent)
