"""One request that passes through: places are taken, backends asked, and answers handed on while they come.

While nothing was shown, what fails is tried on the next deployment; behind that the answer ends in the error, for
nobody else could go on in the middle of it. The last batch is held until the backend has told what the answer took.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from time import monotonic

from unisono.core.conversation import Json, Phase
from unisono.core.deadline import Deadline
from unisono.core.events import Closed, Event, Finished, Text
from unisono.core.generation import Timeouts
from unisono.core.passing import Api, Passage, PassingJob, starred
from unisono.core.routes import Ask, Demand, Place, Pool, Try
from unisono.core.tracing import step_span, try_span
from unisono.core.watching import Pace, StepDone, Waited
from unisono.engine.turn import Report, Run, Turn
from unisono.errors import BackendError, BackendProtocolError, BackendTimeout, ContextTooLong, UnisonoError
from unisono.passthrough.relaying import Relaying, relaying_of

MOST_NAMES: Mapping[Api, tuple[str, ...]] = {
    Api.CHAT: ("max_completion_tokens", "max_tokens"),
    Api.RESPONSES: ("max_output_tokens",),
}
"""Where a body bounds its answer; the first that is there counts."""


class PassingRun(Run):
    """A turn that passes through, in progress."""

    def __init__(self, pool: Pool, turn: Turn, passage: Passage) -> None:
        self.report = Report()
        self._turn = turn
        self._passage = passage
        self._pool = pool
        self._batches: AsyncGenerator[list[Event]] | None = None

    def __aiter__(self) -> AsyncIterator[list[Event]]:
        self._batches = self._each()
        return self._batches

    async def aclose(self) -> None:
        if self._batches is not None:
            await self._batches.aclose()

    async def _each(self) -> AsyncGenerator[list[Event]]:
        turn, report = self._turn, self.report
        owner = turn.caller.key if turn.caller is not None and turn.caller.key else turn.tenant
        route = self._pool.route(Ask(turn.model, owner, turn.sticky, passing=True))
        before: Sequence[Try] = tuple(report.tries)
        passage = self._passage
        # What is reserved for it is rather too much; nobody is to be passed over for that.
        demand = Demand(passage.tokens * 3 // 4, max_tokens=turn.max_tokens)
        deadline, timeouts, moving = Deadline(_now()), None, False
        while True:
            left_s = None if timeouts is None else deadline.left(timeouts, _now()).total_s
            place = await self._waited_for(route.place(demand), left_s)
            with place:
                timeouts = place.deployment.timeouts
                report.backend, report.tries = place.deployment.name, (*before, *route.tries)
                report.failovers += moving
                shown = False
                try:
                    async with aclosing(self._answer(place, deadline.left(timeouts, _now()))) as batches:
                        async for batch in batches:
                            shown = True
                            yield batch
                except (BackendError, ContextTooLong) as error:
                    place.failed(error)
                    report.tries = (*before, *route.tries)
                    if shown:
                        raise
                    moving = True
                else:
                    place.succeeded()
                    return

    async def _waited_for(self, placing: Awaitable[Place], left_s: float | None) -> Place:
        began_s, failure = self.report.now_s(), ""
        try:
            async with asyncio.timeout(left_s):
                return await placing
        except TimeoutError:
            failure = BackendTimeout.code
            raise BackendTimeout("No backend was free in the time there was left for the answer.") from None
        except UnisonoError as error:
            failure = error.code
            raise
        finally:
            self.report.facts.waits.append(Waited(began_s, self.report.now_s(), failure))

    async def _answer(self, place: Place, timeouts: Timeouts) -> AsyncGenerator[list[Event]]:
        """All of an answer on one deployment. Raises what it fails with."""
        if timeouts.total_s <= 0.0:
            raise BackendTimeout("The answer was not complete in the time there was for it.")
        relaying = relaying_of(self._passage)
        telling = Telling(self.report, place.deployment.name, relaying)
        held: list[Event] = []
        coming = place.deployment.passing.answer(self._job(timeouts))
        try:
            async for bodies in coming:
                if relaying.came == 0:
                    place.began()
                passed = relaying.feed(bodies)
                telling.came(monotonic())
                held += passed
                if held and not relaying.ending:
                    yield held
                    held = []
            if not relaying.over:
                raise BackendProtocolError("the backend ended its answer without saying why")
        except UnisonoError as error:
            # What fails behind its end has ended.
            if not relaying.ending:
                telling.failure = error.code
                raise
        finally:
            telling.over()
            if isinstance(coming, AsyncGenerator):
                await coming.aclose()
        said = Closed(Text(0, Phase.FINAL), "".join(relaying.said))
        yield [*held, said, Finished(relaying.reason, relaying.usage)]

    def _job(self, timeouts: Timeouts) -> PassingJob:
        turn, passage = self._turn, self._passage
        span = turn.span
        if span is not None:
            span = span.child(step_span(0)).child(try_span(len(self.report.facts.steps)))
        body = sent_body(passage, turn.max_tokens)
        return PassingJob(
            passage.api, body, passage.stream, starred(turn.model, passage.model), timeouts, turn.request_id, span
        )


class Telling:
    """One generation on `deployment`, noted for whoever watches; a fact of the run when it is over."""

    def __init__(self, report: Report, deployment: str, relaying: Relaying) -> None:
        self._report = report
        self._deployment = deployment
        self._relaying = relaying
        self._began_s = report.now_s()
        self._pace = Pace()
        self.failure = ""

    def came(self, now: float) -> None:
        """Something came; each piece is taken for a token while nobody tells how many there are."""
        if new := self._relaying.came - self._pace.tokens:
            self._pace.came(new, now)

    def over(self) -> None:
        report, pace, relaying = self._report, self._pace, self._relaying
        usage = relaying.usage
        report.facts.steps.append(
            StepDone(
                step=0,
                deployment=self._deployment,
                began_s=self._began_s,
                first_token_s=None if pace.first is None else pace.first - report.began,
                ended_s=report.now_s(),
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                generated=usage.completion_tokens,
                finish=relaying.reason.value if relaying.over else "",
                failure=self.failure,
                gaps=pace.gaps,
                gaps_s=pace.gaps_s,
            )
        )


def sent_body(passage: Passage, max_tokens: int | None) -> Mapping[str, Json]:
    """What a backend gets: what came, with the usage asked for, and no more tokens than a budget leaves."""
    body = dict(passage.body)
    if passage.stream and passage.api is Api.CHAT and not passage.wants_usage:
        options = body.get("stream_options")
        body["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    most = None if max_tokens is None else max(max_tokens // passage.choices, 1)
    if most is not None and (passage.most is None or most < passage.most):
        names = MOST_NAMES[passage.api]
        present = [name for name in names if body.get(name) is not None] or [names[-1]]
        body |= dict.fromkeys(present, most)
    return body


def _now() -> float:
    return asyncio.get_running_loop().time()
