"""Deadline of an answer: it limits every wait, and pauses while server tools run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest

from tests.engine.hosting import ANSWER, SEARCH, Servers, Talk
from tests.engine.scripted import CONVERSATION, IDS, Line
from tests.engine.test_resuming import ENCODING, RENDERER, Continuing, tokens_of
from unisono.core.answer_times import Deadline
from unisono.core.generation import Chunk, CompletionJob, Timeouts
from unisono.core.route_protocol import RouteRequest, RouteRequirements
from unisono.core.tool_host import ToolOutcome
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import EngineDeps
from unisono.engine.generation import Engine
from unisono.engine.request import GenerationRequest
from unisono.errors import BackendTimeout, BackendUnavailable

TIMES = Timeouts(connect_s=10.0, first_token_s=300.0, silence_s=120.0, total_s=600.0)
REMAINING: dict[str, tuple[float, Timeouts]] = {
    "full time left": (0.0, TIMES),
    "less than some timeouts": (500.0, Timeouts(10.0, 100.0, 100.0, 100.0)),
    "less than every timeout": (595.0, Timeouts(5.0, 5.0, 5.0, 5.0)),
    "no time left": (700.0, Timeouts(0.0, 0.0, 0.0, 0.0)),
}


@pytest.mark.parametrize(("spent", "expected"), REMAINING.values(), ids=REMAINING)
def test_timeouts_are_capped_at_the_remaining_time(spent: float, expected: Timeouts) -> None:
    deadline = Deadline(1_000.0)
    assert deadline.remaining(TIMES, 1_000.0 + spent) == expected


def test_stopped_time_does_not_count() -> None:
    deadline = Deadline(0.0)
    deadline.stop(10.0)
    deadline.stop(15.0)
    assert deadline.spent(50.0) == 10.0
    deadline.resume(60.0)
    deadline.resume(61.0)
    assert deadline.spent(65.0) == 15.0


@dataclass
class Slow(Continuing):
    """Backend that pauses before each chunk, and fails after `dies_after` chunks if set."""

    pace_s: float = 0.03
    dies_after: int | None = None

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        until = asyncio.get_running_loop().time() + job.timeouts.total_s
        chunks = 0
        async for chunk in super().complete(job):
            await asyncio.sleep(self.pace_s)
            if asyncio.get_running_loop().time() > until:
                raise BackendTimeout("too slow")
            if chunks == self.dies_after:
                raise BackendUnavailable("gone")
            chunks += 1
            yield chunk


OUTPUT = tokens_of("<|channel|>final<|message|>one two three four five six seven eight nine ten<|return|>")


def engine_of(pool: Line) -> Engine:
    return Engine(
        EngineDeps(
            encoding=ENCODING,
            renderer=RENDERER,
            pool=pool,
            memory=ConversationCache(),
            new_call_id=lambda: "call_random",
        )
    )


async def test_the_next_backend_gets_the_remaining_time_after_failover() -> None:
    timeouts = replace(TIMES, total_s=5.0)
    dying = Slow([OUTPUT], dies_after=4, timeouts=timeouts, name="one")
    other = Slow([OUTPUT], bases=dying.bases, timeouts=timeouts, name="two", pace_s=0.0)
    async for _ in engine_of(Line([dying, other])).start(GenerationRequest("m", CONVERSATION)):
        pass
    first, second = dying.jobs[0].timeouts.total_s, other.jobs[0].timeouts.total_s
    assert 4.9 < first <= 5.0
    assert first - 2.0 < second < first - 0.1
    assert other.jobs[0].timeouts.first_token_s == second


async def test_a_generation_past_its_deadline_does_not_fail_over() -> None:
    timeouts = replace(TIMES, total_s=0.15)
    slow = Slow([OUTPUT], timeouts=timeouts, per_chunk=1, name="one")
    other = Slow([OUTPUT], bases=slow.bases, timeouts=timeouts, name="two")
    pool = Line([slow, other])
    with pytest.raises(BackendTimeout):
        async for _ in engine_of(pool).start(GenerationRequest("m", CONVERSATION)):
            pass
    assert other.jobs == []
    assert pool.slots_in_use == 0


async def test_waiting_for_a_slot_counts_against_the_deadline() -> None:
    @dataclass
    class Full(Line):
        def route(self, ask: RouteRequest):  # type: ignore[no-untyped-def]
            route = super().route(ask)
            next_slot = route.next_slot

            async def slot_after_delay(demand: RouteRequirements):  # type: ignore[no-untyped-def]
                if route.tries:
                    await asyncio.sleep(60.0)
                return await next_slot(demand)

            route.next_slot = slot_after_delay  # type: ignore[method-assign]
            return route

    timeouts = replace(TIMES, total_s=0.3)
    dying = Slow([OUTPUT], dies_after=2, timeouts=timeouts, name="one")
    with pytest.raises(BackendTimeout, match="No backend became free"):
        async for _ in engine_of(Full([dying, replace(dying, name="two")])).start(GenerationRequest("m", CONVERSATION)):
            pass


async def test_tool_time_does_not_count_against_the_deadline() -> None:
    talk = Talk([SEARCH, ANSWER], host=Servers(takes_s=0.3))
    backend = talk.backend()
    await talk.batches(backends=[backend])
    first, second = (job.timeouts.total_s for job in backend.jobs)
    assert first - second < 0.25


async def test_the_slot_is_released_while_tools_run() -> None:
    talk = Talk([SEARCH, ANSWER])
    pool = Line([talk.backend(caps=IDS)])
    slots: list[int] = []

    def answer(name: str, arguments: object) -> ToolOutcome:
        slots.append(pool.slots_in_use)
        return ToolOutcome("so it is")

    talk.host.answer = answer
    engine = talk.engine(*pool.deployments)  # type: ignore[arg-type]
    engine._deps = replace(engine._deps, pool=pool)
    async for _ in engine.start(talk.turn):
        pass
    assert slots == [0]
    assert (pool.slots_in_use, pool.max_slots_in_use, pool.successes, len(pool.demands)) == (0, 1, 2, 2)
    assert pool.demands[1].resumes
