"""Backends that die in the middle of forced calls, answers of a form, budgets and tool loops: what was asked for is had
all the same."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from tests.engine.planning import ENCODING
from tests.engine.scripted import IDS, Line, Standing
from tests.engine.test_plan import CASES, Case
from tests.engine.test_plan_resuming import GUIDED, GUIDED_HIDDEN, STOPS, anonymous, tokens_of
from tests.engine.test_resuming import flat
from tests.harmony.fold import check_lifecycle
from unisono.core.events import Event, Finished
from unisono.core.generation import Capabilities, Chunk, CompletionJob, FinishReason, Timeouts, Usage
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import EngineDeps
from unisono.engine.request import GenerationReport, GenerationRequest
from unisono.engine.service import Engine
from unisono.errors import BackendUnavailable
from unisono.harmony.render import Renderer
from unisono.schemas import violation


@dataclass
class Model:
    """What is said in one generation after the other, whoever is asked. A generation that died is gone on with, or
    begun again behind the same prompt."""

    outputs: Sequence[Sequence[int]]
    at: int = -1
    begun: list[int] = field(default_factory=list)
    over: bool = True

    def left(self, job: CompletionJob) -> list[int]:
        prompt = list(job.prompt.tokens)
        output = list(self.outputs[max(self.at, 0)])
        said = prompt[len(self.begun) :]
        if not self.over and prompt[: len(self.begun)] == self.begun and output[: len(said)] == said:
            assert job.constraint is None or not said, "nobody can be kept to the rest of a body"
            return output[len(said) :]
        if not self.over:
            assert self.begun[: len(prompt)] == prompt, "a prompt that nothing was said behind"
        self.at, self.begun = self.at + self.over, prompt
        return list(self.outputs[min(self.at, len(self.outputs) - 1)])


@dataclass
class Dying(Standing):
    """A backend that dies when it has said `lives` tokens in all."""

    model: Model
    told: Capabilities
    lives: int | None = None
    per_chunk: int = 2
    name: str = "dying"
    timeouts: Timeouts = field(default_factory=Timeouts)
    jobs: list[CompletionJob] = field(default_factory=list)

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        self.jobs.append(job)
        rest = self.model.left(job)
        if not self.told.stop_visible and rest and rest[-1] in STOPS:
            rest = rest[:-1]
        self.model.over = True
        for at in range(0, len(rest), self.per_chunk):
            part = rest[at : at + self.per_chunk]
            if self.lives is not None:
                part, self.lives = part[: self.lives], max(self.lives - len(part), 0)
            if part:
                yield Chunk(tokens=part)
            if self.lives == 0:
                # Behind its last token nobody is asked for more.
                self.model.over = part[-1:] == rest[-1:] and rest[-1] in STOPS
                raise BackendUnavailable("gone")
        yield Chunk(finish=FinishReason.STOP)

    async def aclose(self) -> None:
        pass


async def said(turn: GenerationRequest, *backends: Dying) -> tuple[list[Event], GenerationReport]:
    pool = Line(backends)
    engine = Engine(
        EngineDeps(
            encoding=ENCODING,
            renderer=Renderer(ENCODING),
            pool=pool,
            memory=ConversationCache(),
            new_call_id=lambda: "call_random",
            violation=violation,
        )
    )
    run = engine.start(replace(turn, seed="a seed"))
    events = flat([batch async for batch in run], exact=False)
    check_lifecycle(events)
    assert pool.taken == 0
    return events, run.report


def plain(events: Sequence[Event]) -> list[Event]:
    """Without what a body that was begun again costs, and the ids of calls: those of one that was not shown are
    nobody's."""
    return [_plain(event) for event in events]


def _plain(event: Event) -> Event:
    if isinstance(event, Finished):
        return replace(event, usage=Usage())
    return anonymous(event)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("told", [IDS, GUIDED, GUIDED_HIDDEN], ids=["ids", "guided", "guided, stop hidden"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_a_death_anywhere_leaves_what_was_asked_for_as_it_is(case: Case, told: Capabilities) -> None:
    if replace(told, stop_visible=True) not in case.told:
        return
    outputs = [tokens_of(output) for output in case.outputs]
    for turn, every in ((case.turn, 2), (replace(case.turn, whole=True), 7)):
        alive, report = await said(turn, Dying(Model(outputs), told))
        assert isinstance(alive[-1], Finished)
        for lives in range(1, alive[-1].usage.completion_tokens + 1, every):
            model = Model(outputs)
            events, after = await said(turn, Dying(model, told, lives), Dying(model, told, name="other"))
            assert plain(events) == plain(alive), lives
            assert (after.recoveries, after.unmet) == (report.recoveries, report.unmet)
            assert after.failovers <= 1
