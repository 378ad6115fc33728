"""Output requirements (forced calls, response formats, budgets) after backend failures."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from tests.engine.planning import ENCODING
from tests.engine.scripted import IDS, DeploymentDouble, Line
from tests.engine.test_plan import CASES, Case, applicable
from tests.engine.test_plan_resuming import GUIDED, GUIDED_HIDDEN, STOPS, anonymous, tokens_of
from tests.engine.test_resuming import flat
from tests.harmony.fold import check_lifecycle
from unisono.core.events import Event, Finished
from unisono.core.generation import Capabilities, Chunk, CompletionJob, FinishReason, Timeouts, Usage
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import EngineDeps
from unisono.engine.generation import Engine
from unisono.engine.request import GenerationReport, GenerationRequest
from unisono.errors import BackendUnavailable
from unisono.harmony.render import Renderer
from unisono.schemas import violation


@dataclass
class Model:
    """Model output shared by several backends.

    A failed generation is continued, or begins again after the same prompt.
    """

    outputs: Sequence[Sequence[int]]
    step: int = -1
    prompt_start: list[int] = field(default_factory=list)
    is_finished: bool = True

    def left(self, job: CompletionJob) -> list[int]:
        prompt = list(job.prompt.tokens)
        output = list(self.outputs[max(self.step, 0)])
        output_so_far = prompt[len(self.prompt_start) :]
        if (
            not self.is_finished
            and prompt[: len(self.prompt_start)] == self.prompt_start
            and output[: len(output_so_far)] == output_so_far
        ):
            assert job.constraint is None or not output_so_far, "a constraint cannot be enforced for the rest of a body"
            return output[len(output_so_far) :]
        if not self.is_finished:
            assert self.prompt_start[: len(prompt)] == prompt, "the prompt has no recorded output"
        self.step, self.prompt_start = self.step + self.is_finished, prompt
        return list(self.outputs[min(self.step, len(self.outputs) - 1)])


@dataclass
class Dying(DeploymentDouble):
    """Backend that fails after `lives` tokens in total."""

    model: Model
    caps: Capabilities
    lives: int | None = None
    per_chunk: int = 2
    name: str = "dying"
    timeouts: Timeouts = field(default_factory=Timeouts)
    jobs: list[CompletionJob] = field(default_factory=list)

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        self.jobs.append(job)
        rest = self.model.left(job)
        if not self.caps.stop_visible and rest and rest[-1] in STOPS:
            rest = rest[:-1]
        self.model.is_finished = True
        for position in range(0, len(rest), self.per_chunk):
            piece = rest[position : position + self.per_chunk]
            if self.lives is not None:
                piece, self.lives = piece[: self.lives], max(self.lives - len(piece), 0)
            if piece:
                yield Chunk(tokens=piece)
            if self.lives == 0:
                # No further generation is requested after the last token.
                self.model.is_finished = piece[-1:] == rest[-1:] and rest[-1] in STOPS
                raise BackendUnavailable("gone")
        yield Chunk(finish=FinishReason.STOP)

    async def aclose(self) -> None:
        pass


async def run_request(request: GenerationRequest, *backends: Dying) -> tuple[list[Event], GenerationReport]:
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
    stream = engine.start(replace(request, resumption=replace(request.resumption, seed="a seed")))
    events = flat([batch async for batch in stream], exact=False)
    check_lifecycle(events)
    assert pool.slots_in_use == 0
    return events, stream.report


def comparable(events: Sequence[Event]) -> list[Event]:
    """Return the events without usage and call ids, which differ if a body is generated again."""
    return [_comparable(event) for event in events]


def _comparable(event: Event) -> Event:
    if isinstance(event, Finished):
        return replace(event, usage=Usage())
    return anonymous(event)


@pytest.mark.sampled(one_in=10)
@pytest.mark.parametrize(
    ("case", "capabilities"),
    applicable(
        CASES,
        {"ids": IDS, "constrained": GUIDED, "constrained, stop hidden": GUIDED_HIDDEN},
        lambda case, capabilities: replace(capabilities, stop_visible=True) in case.told,
    ),
)
async def test_output_requirements_are_met_after_a_failure_at_any_token(case: Case, capabilities: Capabilities) -> None:
    outputs = [tokens_of(output) for output in case.outputs]
    for request, stride in ((case.turn, 2), (replace(case.turn, answer=replace(case.turn.answer, whole=True)), 7)):
        expected, report = await run_request(request, Dying(Model(outputs), capabilities))
        assert isinstance(expected[-1], Finished)
        for lives in range(1, expected[-1].usage.completion_tokens + 1, stride):
            model = Model(outputs)
            events, failover_report = await run_request(
                request, Dying(model, capabilities, lives), Dying(model, capabilities, name="other")
            )
            assert comparable(events) == comparable(expected), lives
            assert (failover_report.recoveries, failover_report.unmet) == (report.recoveries, report.unmet)
            assert failover_report.failovers <= 1
