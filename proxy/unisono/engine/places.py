"""The places that one run is given: one is taken when there is something to generate and kept until it is let go.

All times of an answer are one: what a deployment may take is what is left of it.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace

from unisono.core.deadline import Deadline
from unisono.core.generation import Timeouts
from unisono.core.routes import Ask, Demand, Place, Pool
from unisono.core.tracing import Trace, step_span, try_span
from unisono.core.watching import Waited
from unisono.engine.turn import Report, Turn
from unisono.errors import BackendTimeout, UnisonoError


class Places:
    """For one run."""

    def __init__(self, pool: Pool, turn: Turn, report: Report, *, passing: bool = False) -> None:
        """`passing` is for deployments that answer in OpenAI's own API."""
        self._turn = turn
        self._report = report
        owner = turn.caller.key if turn.caller is not None and turn.caller.key else turn.tenant
        self._route = pool.route(Ask(turn.model, owner, turn.sticky, passing=passing))
        # An answer that cannot go on elsewhere must not end early either.
        self._can_resume = turn.failover and not passing
        self._before = tuple(report.tries)
        self._deadline = Deadline(self._now())
        self._place: Place | None = None
        self._held = ExitStack()
        self._asked = False
        self._timeouts: Timeouts | None = None
        self._moving = False
        """Whether the next place is one to move to."""

    @property
    def elsewhere(self) -> bool:
        """Whether there is another deployment to turn to."""
        return self._route.elsewhere

    @property
    def late(self) -> bool:
        """Whether the time for the answer is over."""
        return self._timeouts is not None and self._deadline.left(self._timeouts, self._now()).total_s <= 0.0

    @property
    def taken(self) -> bool:
        """Whether a place is held."""
        return self._place is not None

    async def place_for(self, demand: Demand) -> Place:
        """The next place; none is held. Raises what keeps it from being had."""
        left = None if self._timeouts is None else self._deadline.left(self._timeouts, self._now()).total_s
        place = await self._waited_for(demand, left)
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

    async def _waited_for(self, demand: Demand, left_s: float | None) -> Place:
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
            self._report.facts.waits.append(Waited(began_s, self._report.now_s(), failure))

    def asked(self) -> None:
        """The backend of the place that is held is asked for something."""
        self._asked = True

    def timeouts(self, place: Place) -> Timeouts:
        """Begin an attempt and return its time limits. Raises BackendTimeout if no time is left for the answer."""
        timeouts = self._deadline.left(place.deployment.timeouts, self._now())
        if timeouts.total_s <= 0.0:
            raise BackendTimeout(f"The answer was not complete within {place.deployment.timeouts.total_s:g} seconds.")
        route = self._route
        limits = place.attempt_limits(timeouts, retries_left=route.retries_left, elsewhere=route.elsewhere)
        return limits if self._can_resume else replace(limits, silence_s=timeouts.silence_s)

    def span(self, step: int) -> Trace | None:
        """The next generation's, below that of its step."""
        if self._turn.span is None:
            return None
        return self._turn.span.child(step_span(step)).child(try_span(len(self._report.facts.steps)))

    def fail(self, error: UnisonoError, *, moves: bool = False) -> None:
        """The place that is held failed, and is given back. Who `moves` goes on behind it on the next one."""
        if self._place is not None:
            self._place.failed(error)
        self._report.tries = (*self._before, *self._route.tries)
        self._moving = moves
        self.release()

    def let_go(self) -> None:
        """Give back the place, if one is held, where all was well; the time is somebody else's until one is taken."""
        if self._place is not None and self._asked:
            self._place.succeeded()
        self.release()
        self._deadline.stop(self._now())

    def go_on(self) -> None:
        """The time is this answer's again."""
        self._deadline.go_on(self._now())

    def release(self) -> None:
        """Give back the place, if one is held."""
        self._place = None
        self._held.close()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
