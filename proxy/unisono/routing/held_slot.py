"""Slot of one request on one deployment, and the reports about its attempts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Final, Protocol, Self

from unisono.core.error_texts import LATE_START_REMEDY, seconds
from unisono.core.generation import Capabilities, Chunk, CompletionJob, Timeouts
from unisono.core.ports import Deployment
from unisono.core.route_protocol import RouteRequirements
from unisono.errors import BackendError, BackendTimeout, Symptom, UnisonoError
from unisono.routing.attempt_timeouts import (
    AttemptSample,
    FirstTokenWait,
    PendingAttempt,
    attempt_timeouts,
    probe_due_at,
)
from unisono.routing.circuit_breaker import BreakerFailure, kind_of
from unisono.routing.deployment import LiveDeployment, SlotReservation
from unisono.routing.group import DeploymentGroup
from unisono.routing.hedge import HedgeActions, HedgedDeployment, hedged

NO_LIMIT: Final = nullcontext()


class SlotSource(Protocol):
    """Route that assigned a slot, receives reports of failures, and knows the alternatives."""

    @property
    def identity(self) -> str:
        """Identity of the requester, to which failures are attributed."""
        ...

    def move(self, group: DeploymentGroup, live: LiveDeployment) -> None:
        """Record that the attempt is now on the deployment `live` of the group."""
        ...

    def record_failure(self, group: DeploymentGroup, live: LiveDeployment, error: UnisonoError) -> None:
        """Record that an attempt on a deployment of the group ended in `error`."""
        ...

    def has_alternative(self, prompt_tokens: int) -> bool:
        """Return whether another healthy deployment can hold a prompt of `prompt_tokens` tokens."""
        ...


class HeldSlot:
    """Right to generate on one deployment, until the context manager exits."""

    def __init__(
        self,
        route: SlotSource,
        group: DeploymentGroup,
        hold: SlotReservation,
        capabilities: Capabilities,
        demand: RouteRequirements,
        excluded: int = 0,
    ) -> None:
        self._route = route
        self._demand = demand
        self._excluded = excluded
        self._was_switched = False
        self._group = group
        self._hold: SlotReservation | None = hold
        self._live = hold.live
        self._since = hold.at
        self.capabilities = capabilities
        self._prompt_tokens = demand.prompt_tokens
        self._knows_cache = bool(demand.blocks) and group.knows_caches
        self._wait: FirstTokenWait | None = None
        # State of the current attempt.
        self._unread_tokens = 0
        self._give_up_at: float | None = None
        self._is_cut_short = False
        self._generates = False
        self._patience_s: float | None = None
        self._limit: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.deployment: Deployment = self._live
        if group.rules.hedge is not None and not self._live.passes:
            self.deployment = HedgedDeployment(lambda: self._live, self._complete)

    def _complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        """Start a generation; if the deployment sends nothing for a while, a second one is used too."""
        rules, group, live = self._group.rules.hedge, self._group, self._live
        assert rules is not None
        group.hedges.add_request()
        delay_s = rules.delay_s(live, self._unread_tokens)
        if delay_s is None or self._hold is None or len(group.members) < 2:
            return live.backend.complete(job)
        reserve = partial(group.reserve_other, live, self._demand, self._excluded)
        actions = HedgeActions(reserve, self._switch, lambda one, error: one.failed(error, self._route.identity))
        return hedged(live, job, delay_s, actions)

    def _switch(self, hold: SlotReservation) -> None:
        """Replace the slot with `hold`, on another deployment that sent its first token earlier."""
        self._end_attempt()
        assert self._hold is not None
        # The deployment received the request, so the request counts against the rate limits.
        self._hold.share.record_usage(self._prompt_tokens)
        self._live.give_back(self._hold)
        self._hold, self._live, self._since = hold, hold.live, hold.at
        self._was_switched = True
        hold.live.hedges_won += 1
        self._route.move(self._group, hold.live)

    def attempt_timeouts(
        self, timeouts: Timeouts, *, retries_left: int, elsewhere: bool, other_kind: bool = False
    ) -> Timeouts:
        self._end_attempt()
        live, now = self._live, self._live.clock()
        can_move = other_kind or (elsewhere and self._route.has_alternative(self._prompt_tokens))
        retries = max(retries_left, 1) if can_move else 0
        attempt = PendingAttempt(self._prompt_tokens, live.waits.unread_tokens, retries)
        limits = attempt_timeouts(timeouts, live.terms.min_timeouts, attempt, live.times.learned(now))
        # The time left after queueing or earlier attempts may be too short for any deployment. A timeout is then not
        # counted as a failure of this one.
        fair_s = live.timeouts.total_s / max(self._group.rules.num_retries + 1, 2)
        self._is_cut_short = timeouts.total_s < fair_s and timeouts.total_s <= limits.first_token_s
        share_s = max(limits.first_token_s, timeouts.total_s / (retries + 1))
        self._give_up_at = now + share_s if retries else None
        if self._hold is not None:
            self._unread_tokens = self._hold.share.unread_tokens
            self._wait = FirstTokenWait(self._unread_tokens, probe_due_at(now, limits.first_token_s))
            live.waits.add(self._wait)
        self._patience_s = None
        if live.candidate.running > 1:
            # The server may have to finish other answers first, because its concurrency is unknown.
            self._patience_s = limits.first_token_s
            limits = replace(limits, first_token_s=min(timeouts.first_token_s, timeouts.total_s, share_s))
        return limits

    def first_token_limit(self) -> AbstractAsyncContextManager[None]:
        return NO_LIMIT if self._patience_s is None else self._limited_to(self._patience_s)

    @asynccontextmanager
    async def _limited_to(self, patience_s: float) -> AsyncGenerator[None]:
        loop, live = asyncio.get_running_loop(), self._live
        try:
            async with asyncio.timeout(None) as limit:
                self._limit = limit
                self._timer = loop.call_later(patience_s, self._check_limit, live, limit, live.clock(), patience_s)
                try:
                    yield
                finally:
                    self._end_limit()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise BackendTimeout(
                "the backend sent no first token, and generated nothing for other requests, for "
                f"{seconds(patience_s)}; {LATE_START_REMEDY}"
            ) from error

    def _check_limit(self, live: LiveDeployment, limit: asyncio.Timeout, began_at: float, patience_s: float) -> None:
        """Let `limit` expire if the deployment has sent nothing for `patience_s` seconds."""
        loop, now = asyncio.get_running_loop(), live.clock()
        left_s = max(began_at, live.generation.last_at(now)) + patience_s - now
        if left_s > 0.0:
            self._timer = loop.call_later(left_s, self._check_limit, live, limit, began_at, patience_s)
        else:
            limit.reschedule(loop.time())

    def _end_limit(self) -> None:
        limit, self._limit = self._limit, None
        if self._timer is not None:
            self._timer.cancel()
        # A limit that expires as the first token arrives must not cancel what the task does next.
        if limit is not None and not limit.expired():
            limit.reschedule(None)

    def record_attempt(
        self, first_token_s: float, largest_gap_s: float | None = None, read_tokens: int | None = None
    ) -> None:
        if self._was_switched:
            # The measured times include the wait for the first deployment, so they do not describe this deployment.
            self._was_switched = False
            return
        if read_tokens is None and self._knows_cache:
            read_tokens = self._unread_tokens
        live = self._live
        live.times.record(AttemptSample(live.clock(), first_token_s, largest_gap_s, read_tokens))

    def on_failed_probe(self, callback: Callable[[float], None] | None) -> None:
        wait, give_up_at, clock = self._wait, self._give_up_at, self._live.clock
        if wait is None or give_up_at is None:
            return
        wait.on_failed_probe = None if callback is None else lambda: callback(max(give_up_at - clock(), 0.0))

    def _end_wait(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            self._live.waits.remove(wait)
        if self._limit is not None:
            self._end_limit()

    def _end_attempt(self) -> None:
        if self._wait is not None or self._limit is not None:
            self._end_wait()
        if self._generates:
            self._generates = False
            self._live.generation.end(self._live.clock())

    def failed(self, error: UnisonoError) -> None:
        self._end_attempt()
        kind = kind_of(error)
        if kind is BreakerFailure.UNREACHABLE and not _may_live(error):
            self._live.times.clear()
            self._group.forget(self._live)
        if not (kind is BreakerFailure.TIMEOUT and self._is_cut_short):
            if kind is BreakerFailure.TIMEOUT:
                self._live.times.record_timeout()
            self._live.failed(error, self._route.identity)
        self._route.record_failure(self._group, self._live, error)

    def record_first_token(self) -> None:
        self._end_wait()
        if not self._generates and self._hold is not None:
            self._generates = True
            self._live.generation.start_generation(self._live.clock())
        if self._hold is not None:
            self._hold.share.record_first_token()

    def record_usage(self, tokens: int) -> None:
        self._end_attempt()
        # The prompt of the next attempt on this slot contains the tokens of this one.
        self._prompt_tokens = max(self._prompt_tokens, tokens)
        if self._hold is not None:
            self._hold.share.record_usage(tokens)

    def succeeded(self) -> None:
        self._live.succeeded(self._since)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_attempt()
        # A hedged deployment refers to this slot. The cycle would keep both until a garbage collection.
        self.deployment = self._live
        hold, self._hold = self._hold, None
        if hold is not None:
            self._live.give_back(hold)


def _may_live(error: UnisonoError) -> bool:
    """Return whether only a probe can tell if the server that dropped the connection still runs."""
    return isinstance(error, BackendError) and error.symptom is Symptom.DISCONNECTED
