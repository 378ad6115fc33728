"""One request's way through the deployments of its model, and of the models that stand in for it.

What failed is tried elsewhere: another deployment first, then another group. While nothing was shown that is bounded by
`num_retries` and paid from the group's budget, but for the first move away from a deployment that died; an answer that
a client is reading goes on for free, a few times, and may come back to where it was before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

from unisono.core.generation import Capabilities
from unisono.core.ports import Deployment
from unisono.core.routes import Ask, Demand, Try
from unisono.core.symptom import Symptom
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendUnavailable,
    ContextTooLong,
    UnisonoError,
)
from unisono.routing.deployment import Hold, LiveDeployment
from unisono.routing.group import Group
from unisono.routing.health import Failure, kind_of
from unisono.routing.policy import Rank, Wanted

MOST_DEATHS: Final = 5
"""How often an answer that is being read goes on elsewhere. One that kills whatever it is put on must come to an
end."""

DEATHS: Final = frozenset({Failure.UNREACHABLE, Failure.PROTOCOL, Failure.ERROR})
"""Failures by which a deployment takes itself out, so that moving away from it is no burden on it; being too busy or
too slow is shared by whoever comes next."""


class HeldPlace:
    """The right to generate on one deployment, until it is left."""

    def __init__(self, route: GroupRoute, group: Group, hold: Hold, capabilities: Capabilities) -> None:
        self._route = route
        self._group = group
        self._hold: Hold | None = hold
        self._live = hold.live
        self._since = hold.at
        self.capabilities = capabilities

    @property
    def deployment(self) -> Deployment:
        return self._live

    def failed(self, error: UnisonoError) -> None:
        if kind_of(error) is Failure.UNREACHABLE and not _may_live(error):
            self._group.forget(self._live)
        self._live.failed(error, self._route.identity)
        self._route.fell(self._group, self._live, error)

    def began(self) -> None:
        if self._hold is not None:
            self._hold.share.began()

    def took(self, tokens: int) -> None:
        if self._hold is not None:
            self._hold.share.took(tokens)

    def succeeded(self) -> None:
        self._live.succeeded(self._since)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            self._live.give_back(hold)


class GroupRoute:
    """Through `group`, then `fallbacks`; where the prompt is too long for a group, through `larger` before these."""

    def __init__(self, ask: Ask, group: Group, fallbacks: Sequence[Group] = (), larger: Sequence[Group] = ()) -> None:
        self._ask = ask
        self._group = group
        self._fallbacks = tuple(fallbacks)
        self._larger = tuple(larger)
        self._tries: list[Try] = []
        self._failure: UnisonoError | None = None
        self._at: tuple[Group, LiveDeployment] | None = None
        """Where the last place was."""
        self._gone = 0
        """Bits of deployments that failed."""
        self._failures: dict[str, int] = {}
        """Failures that count against `num_retries`, by model."""
        self._deaths = 0
        self._moved = False
        """Whether a move away from a dead deployment was made for free."""
        self._back = 0
        """Bits of deployments that failed in a way that may be over."""
        self._resumes = False
        """Whether the last place was to go on with what a client is reading."""

    @property
    def tries(self) -> Sequence[Try]:
        return self._tries

    @property
    def identity(self) -> str:
        """Who is asking, for failures to be blamed on."""
        return self._ask.identity()

    @property
    def elsewhere(self) -> bool:
        last = self._at[1].candidate.bit if self._at is not None else 0
        back = self._back if self._resumes and self._deaths < MOST_DEATHS else 0
        groups = (self._group, *self._larger, *self._fallbacks)
        for one in (live.candidate for group in groups for live in group.members):
            if one.bit & last or one.rank is Rank.UNFIT:
                continue
            if not one.bit & self._gone or one.bit & back:
                return True
        return False

    async def place(self, demand: Demand) -> HeldPlace:
        self._resumes = demand.resumes
        if self._failure is None:
            if self._at is None:
                self._group.budget.asked(self._group.in_flight, self._now())
            elif (place := self._again(demand)) is not None:
                return place
        else:
            self._judge(demand)
        refusal: BackendError | None = None
        last_resorts: list[Group] = []
        groups = list(self._groups(demand))
        for group in groups:
            if len(groups) > 1 and not group.serves(self._wanted(group, demand)):
                last_resorts.append(group)
                continue
            try:
                return await self._taken(group, demand)
            except BackendError as error:
                refusal = refusal or error
        for group in last_resorts:
            try:
                return await self._taken(group, demand)
            except BackendError as error:
                refusal = refusal or error
        if self._failure is not None and not isinstance(refusal, BackendOverloaded):
            raise self._failure.with_traceback(None)
        raise refusal or BackendUnavailable("No backend serves this model right now.")

    def fell(self, group: Group, live: LiveDeployment, error: UnisonoError) -> None:
        self._tries[-1] = replace(self._tries[-1], failure=error.code)
        self._failure = error
        self._gone |= live.candidate.bit
        if kind_of(error) is not None:
            self._back |= live.candidate.bit
        self._deaths += 1
        if not isinstance(error, ContextTooLong):
            self._failures[group.model] = self._failures.get(group.model, 0) + 1

    def _judge(self, demand: Demand) -> None:
        """Whether there may be another try at all. Raises what the last one failed with."""
        error = self._failure
        assert error is not None
        assert self._at is not None
        if isinstance(error, ContextTooLong):
            return
        if not isinstance(error, BackendError) or not error.retry_elsewhere:
            raise error
        if demand.resumes:
            if self._deaths > MOST_DEATHS:
                raise error
            return
        group = self._at[0]
        free = not self._moved and kind_of(error) in DEATHS
        if free and any(one.serves(self._wanted(one, demand)) for one in self._groups(demand)):
            self._moved = True
        elif not group.budget.pay(self._now()):
            if error.retry_after_s is None:
                error.retry_after_s = group.line.expected_s()
            raise error

    def _groups(self, demand: Demand) -> Iterator[Group]:
        """Those that may be asked, in order, each once."""
        seen: set[Group] = set()
        too_long = isinstance(self._failure, ContextTooLong) or self._too_long(demand)
        for group in (self._group, *(self._larger if too_long else ()), *self._fallbacks):
            tried = self._failures.get(group.model, 0)
            if group not in seen and (demand.resumes or tried <= group.rules.num_retries):
                seen.add(group)
                yield group

    def _too_long(self, demand: Demand) -> bool:
        sizes = [one.candidate.context for one in self._group.members]
        return all(size is not None and size <= demand.prompt_tokens for size in sizes)

    def _wanted(self, group: Group, demand: Demand) -> Wanted:
        wanted = group.wanted(demand, self._ask.sticky, self._gone)
        if demand.resumes and self._at is not None and not group.serves(wanted):
            # Whoever failed first may be well again, even one that rests; whoever failed last had its chance just now.
            last = self._at[1].candidate.bit if self._failure is not None else 0
            return replace(wanted, excluded=(self._gone & ~self._back) | last)
        return wanted

    def _again(self, demand: Demand) -> HeldPlace | None:
        """The same deployment, if it has a place: what is cached there is worth more than somebody else's turn."""
        assert self._at is not None
        group, live = self._at
        wanted = group.wanted(demand, self._ask.sticky, 0)
        one = live.candidate
        live.refresh(self._now())
        if live.known is None or one.rank > Rank.HALF_OPEN or not one.can(wanted) or not one.has_room(wanted.tokens):
            return None
        return self._given(group, group.take(live, demand, wanted), live.known)

    async def _taken(self, group: Group, demand: Demand) -> HeldPlace:
        """A place in a group, waiting in its line. Raises the `BackendError` family."""
        number = group.line.number()
        until = asyncio.get_running_loop().time() + group.rules.bounds.timeout_s
        wanted = self._wanted(group, demand)
        error: BackendError | None = None
        while True:
            hold = await group.wait_for(self._ask.owner, number, demand, wanted, until)
            if hold is not None:
                if hold.live.known is not None:
                    return self._given(group, hold, hold.live.known)
                # It was put to rest in the moment between.
                hold.live.give_back(hold)
            choice = group.choice(wanted)
            if choice.taken is None and choice.waits_for:
                continue
            live = group.by_bit[choice.taken.bit] if choice.taken else self._unfit(group, wanted)
            if live is None:
                raise error or BackendUnavailable("No backend serves this model right now.")
            try:
                await group.examined(live)
            except BackendError as failure:
                error = error or failure
                wanted = replace(wanted, excluded=wanted.excluded | live.candidate.bit)

    def _unfit(self, group: Group, wanted: Wanted) -> LiveDeployment | None:
        """One that was found unfit: where there is nobody else it is asked whether it still is."""
        unfit = (one for one in group.members if one.candidate.rank is Rank.UNFIT)
        return next((one for one in unfit if not one.candidate.bit & wanted.excluded), None)

    def _given(self, group: Group, hold: Hold, capabilities: Capabilities) -> HeldPlace:
        live = hold.live
        if self._failure is not None or self._at is None or self._at[1] is not live:
            self._tries.append(Try(live.name, model=group.model))
        self._failure = None
        self._at = (group, live)
        return HeldPlace(self, group, hold, capabilities)

    def _now(self) -> float:
        return self._group.now()


def _may_live(error: UnisonoError) -> bool:
    """Whether a request was dropped by a server that may be the same process as before, which a probe will tell."""
    return isinstance(error, BackendError) and error.symptom is Symptom.DISCONNECTED
