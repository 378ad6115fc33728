"""Requests with output requirements on scripted backends, and their outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.engine.options import changed
from tests.engine.scripted import IDS, TEXT, Runner, Scripted, Step
from tests.harmony.fold import check_lifecycle, items_of, rules_of
from tests.harmony.recoveries import C, F, P, R
from unisono.core.conversation import AnswerForm, Conversation, FunctionTool, Json, Preamble, UserMessage
from unisono.core.events import Event, Finished
from unisono.core.generation import CONSTRAINT_KINDS, Capabilities, CompletionJob, Constraint
from unisono.engine.request import (
    Choice,
    ForcedCalls,
    GenerationReport,
    GenerationRequest,
)
from unisono.harmony.encoding import load_encoding
from unisono.schemas import violation

ENCODING = load_encoding()
GUIDED = replace(IDS, constrain=frozenset(CONSTRAINT_KINDS))
GUIDED_TEXT = replace(TEXT, constrain=frozenset(CONSTRAINT_KINDS))
BACKENDS = {"ids": IDS, "text": TEXT, "ids, guided": GUIDED, "text, guided": GUIDED_TEXT}

CITY: dict[str, Json] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
SUM: dict[str, Json] = {"type": "object", "properties": {"a": {"type": "number"}}}
TOOLS = (
    FunctionTool("get_weather", "The weather.", CITY),
    FunctionTool("add", "Adds.", SUM),
    FunctionTool("now", "The time."),
)
CONVERSATION = Conversation(Preamble(tools=TOOLS, date="2026-01-01"), (UserMessage("Hi"),))
WITHOUT_TOOLS = Conversation(Preamble(date="2026-01-01"), (UserMessage("Hi"),))
CITY_FORM = AnswerForm("city", CITY, strict=True)

T = "<|channel|>analysis<|message|>Hm.<|end|>"
S = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>I look."
WEATHER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
ADD = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
NOW = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
NAMING = "<|channel|>commentary to=functions"
PARIS = '{"city":"Paris"}'
NAMED = ForcedCalls(frozenset({"get_weather"}))
ANY = ForcedCalls()


def turn(choice: Choice | None = None, conversation: Conversation = CONVERSATION, **more: object) -> GenerationRequest:
    return changed(GenerationRequest("m", conversation), choice=choice, tenant="team", **more)


@dataclass
class PlanOutcome:
    """Outcome of one generation.

    `suffixes` has, for each step, the text that its prompt adds to the prompt of the first step.
    """

    events: list[Event]
    report: GenerationReport
    jobs: list[CompletionJob]
    suffixes: list[str] = field(default_factory=list)

    @property
    def items(self) -> tuple[R | P | F | C, ...]:
        return items_of(self.events)

    @property
    def rules(self) -> tuple[str, ...]:
        return rules_of(self.events)

    @property
    def constraints(self) -> list[Constraint | None]:
        return [job.constraint for job in self.jobs]

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last


async def ask(
    outputs: Sequence[str | Step],
    request: GenerationRequest,
    capabilities: Capabilities = IDS,
    *,
    per_chunk: int = 3,
    spare: bool = False,
) -> PlanOutcome:
    """Run one generation against scripted outputs, which are all requested except with `spare`."""
    steps = [output if isinstance(output, Step) else Step(output) for output in outputs]
    backend = Scripted(ENCODING, steps, caps=capabilities, per_chunk=per_chunk)
    run = Runner(ENCODING, backend).engine_with(violation).start(request)
    batches = [batch async for batch in run]
    assert all(batches)
    events = [event for batch in batches for event in batch]
    check_lifecycle(events)
    assert spare or len(backend.jobs) == len(steps), f"{len(backend.jobs)} of {len(steps)} steps were requested"
    first = backend.jobs[0].prompt
    outcome = PlanOutcome(events, run.report, backend.jobs)
    for job in backend.jobs:
        tokens = list(job.prompt.tokens)
        assert tokens[: len(first.tokens)] == list(first.tokens)
        outcome.suffixes.append(ENCODING.decode(tokens[len(first.tokens) :]))
        if capabilities.prompt is TEXT.prompt:
            assert job.prompt.text == (first.text or "") + outcome.suffixes[-1]
    return outcome
