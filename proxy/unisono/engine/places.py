"""Slot session: the slots of one answer, and recovery from failed attempts.

A slot is acquired when something has to be generated, and held until it is released. All attempts share one deadline:
each gets the time left for the answer.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import inf

from unisono.core.deadline import Deadline
from unisono.core.generation import Timeouts
from unisono.core.observer import SlotWait
from unisono.core.route_protocol import DeploymentPool, RouteRequest, RouteRequirements, Slot
from unisono.core.trace_context import TraceContext, step_span, try_span
from unisono.engine.failover import Action, AttemptError, Options, Progress, decide, failure_kind
from unisono.engine.identity import identity_of
from unisono.engine.turn import GenerationReport, GenerationRequest
from unisono.errors import BackendTimeout, UnisonoError

MOVES = frozenset({Action.RESUME, Action.RESTART, Action.RETRY, Action.WAIT})  # actions that lead to another attempt


class SlotSession:
    """Slots and attempts of one answer."""

    def __init__(
        self, pool: DeploymentPool, turn: GenerationRequest, report: GenerationReport, *, passing: bool = False
    ) -> None:
        """`passing` selects deployments that answer in OpenAI's own API."""
        self._turn = turn
        self._report = report
        owner = turn.caller.key if turn.caller is not None and turn.caller.key else turn.tenant
        ask = RouteRequest(turn.model, owner, turn.sticky, passing=passing, identity=partial(identity_of, turn))
        self._route = pool.route(ask)
        # An answer that cannot continue elsewhere must not get a shortened silence limit either.
        self._can_resume = turn.failover and not passing
        self._before = tuple(report.tries)
        self._deadline = turn.deadline or Deadline(self._now())
        self._place: Slot | None = None
        self._held = ExitStack()
        self._asked = False
        self._timeouts: Timeouts | None = None
        self._moving = False  # the next slot counts as a failover

    @property
    def elsewhere(self) -> bool:
        """Return whether another deployment is available."""
        return self._route.elsewhere

    @property
    def left_s(self) -> float:
        """Return the time left for the answer in seconds; 0 when it has passed."""
        return inf if self._timeouts is None else self._deadline.left(self._timeouts, self._now()).total_s

    @property
    def taken(self) -> bool:
        """Return whether a slot is held."""
        return self._place is not None

    async def place_for(self, demand: RouteRequirements) -> Slot:
        """Acquire the next slot; none is held.

        Raises the error if none is available.
        """
        place = await self._waited_for(demand, None if self._timeouts is None else self.left_s)
        self._place = self._held.enter_context(place)
        self._asked = False
        self._timeouts = place.deployment.timeouts
        self._report.model = self._turn.model
        self._report.backend = place.deployment.name
        self._report.tries = (*self._before, *self._route.tries)
        if self._moving:
            self._moving = False
            self._report.failovers += 1
        return place

    async def _waited_for(self, demand: RouteRequirements, left_s: float | None) -> Slot:
        began_s, failure = self._report.now_s(), ""
        try:
            async with asyncio.timeout(left_s):
                return await self._route.place(demand)
        except TimeoutError:
            failure = BackendTimeout.code
            raise BackendTimeout("No backend was free in the time there was left for the answer.") from None
        except UnisonoError as error:
            failure = error.code
            raise
        finally:
            self._report.facts.waits.append(SlotWait(began_s, self._report.now_s(), failure))

    def asked(self) -> None:
        """Record that the backend of the held slot was sent a request."""
        self._asked = True

    def timeouts(self, place: Slot) -> Timeouts:
        """Begin an attempt and return its time limits.

        Raises BackendTimeout if no time is left for the answer.
        """
        timeouts = self._deadline.left(place.deployment.timeouts, self._now())
        route = self._route
        limits = place.attempt_limits(
            timeouts,
            retries_left=route.retries_left,
            elsewhere=route.elsewhere,
            other_kind=self._turn.has_other_kind,
        )
        if timeouts.total_s <= 0.0:
            raise BackendTimeout(f"The answer was not complete within {place.deployment.timeouts.total_s:g} seconds.")
        return limits if self._can_resume else replace(limits, silence_s=timeouts.silence_s)

    def span(self, step: int) -> TraceContext | None:
        """Return the trace span of the next generation, a child of its step's span."""
        if self._turn.span is None:
            return None
        return self._turn.span.child(step_span(step)).child(try_span(len(self._report.facts.steps)))

    async def recover(
        self, error: AttemptError, progress: Progress, *, resumable: bool, regenerable: bool = False
    ) -> Action:
        """Apply the failover policy to an attempt that failed; raise `error` if nothing follows.

        The action is never WAIT: the pause is made here. The slot is released, except for a RESTART on the same
        deployment; then `taken` is still true.
        """
        if not (self.taken or self._route.tries):
            # No attempt was made: `error` is the reason why no slot is available.
            raise error
        kind, left_s = failure_kind(error), self.left_s
        resumes = resumable and progress is not Progress.NOTHING
        found = self._route.prospects(error, resumes=resumes, held=self.taken)
        options = Options(
            available=found.available and left_s > 0.0,
            later=not self._turn.has_other_kind and found.later_s is not None and found.later_s < left_s,
            resumable=resumable,
            regenerable=regenerable and self.taken,
        )
        action = decide(kind, progress, options)
        if action is Action.RESTART and not options.available:
            return action
        self.fail(error, moves=action in MOVES)
        if action is Action.RAISE:
            raise error
        if action is Action.WAIT:
            assert found.later_s is not None
            await asyncio.sleep(found.later_s)
            self._route.retry_failed()
            return decide(kind, progress, replace(options, available=True))
        return action

    def fail(self, error: UnisonoError, *, moves: bool = False) -> None:
        """Report the held slot as failed and release it.

        `moves`: another attempt follows on the next slot.
        """
        if self._place is not None:
            self._place.failed(error)
        self._report.tries = (*self._before, *self._route.tries)
        self._moving = moves
        self.release()

    def let_go(self) -> None:
        """Release the held slot, if any, as successful; stop the clock until one is acquired."""
        if self._place is not None and self._asked:
            self._place.succeeded()
        self.release()
        self._deadline.stop(self._now())

    def go_on(self) -> None:
        """Resume the clock of the answer."""
        self._deadline.go_on(self._now())

    def release(self) -> None:
        """Release the held slot, if any."""
        self._place = None
        self._held.close()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
