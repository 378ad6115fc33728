"""The step plan on scripted backends: what is cut, what is put there, and what the backend is asked for behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from tests.engine.scripted import IDS, TEXT, Runner, Scripted, Step
from tests.harmony.fold import check_lifecycle, items_of
from tests.harmony.recoveries import C, F, P, R
from unisono.core.conversation import Conversation, FunctionTool, Json, Preamble, UserMessage
from unisono.core.events import Event, Finished
from unisono.core.generation import (
    CONSTRAINT_KINDS,
    Capabilities,
    Constraint,
    FinishReason,
    JsonSchema,
)
from unisono.engine.turn import Choice, Forced, Report, Turn
from unisono.harmony.encoding import load_encoding
from unisono.schemas import violation

ENCODING = load_encoding()
GUIDED = replace(IDS, constrain=frozenset(CONSTRAINT_KINDS))
GUIDED_TEXT = replace(TEXT, constrain=frozenset(CONSTRAINT_KINDS))
FORMS = {"ids": IDS, "text": TEXT, "ids, guided": GUIDED, "text, guided": GUIDED_TEXT}

CITY: dict[str, Json] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (
    FunctionTool("get_weather", "The weather.", CITY),
    FunctionTool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "number"}}}),
    FunctionTool("now", "The time."),
)
WEATHER = Conversation(Preamble(tools=TOOLS, date="2026-01-01"), (UserMessage("Hi"),))
PLAIN = Conversation(Preamble(date="2026-01-01"), (UserMessage("Hi"),))

T = "<|channel|>analysis<|message|>Hm.<|end|>"
S = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALLS = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
WEATHER_HEADER = CALLS.format("get_weather")
PARIS = '{"city":"Paris"}'
ONLY_WEATHER = Forced(frozenset({"get_weather"}))


@dataclass
class Ask:
    """One turn against scripted steps, and everything that can be known of it afterwards."""

    outputs: Sequence[str | Step]
    turn: Turn = field(default_factory=lambda: Turn("m", WEATHER, tenant="team"))
    told: Capabilities = IDS
    per_chunk: int = 3
    events: list[Event] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    prompts: list[str] = field(default_factory=list)
    """What each prompt has behind the first one's."""
    constraints: list[Constraint | None] = field(default_factory=list)

    async def run(self) -> Ask:
        steps = [output if isinstance(output, Step) else Step(output) for output in self.outputs]
        backend = Scripted(ENCODING, steps, told=self.told, per_chunk=self.per_chunk)
        runner = Runner(ENCODING, backend)
        run = runner.engine_with(violation).start(self.turn)
        batches = [batch async for batch in run]
        assert all(batches)
        self.events = [event for batch in batches for event in batch]
        self.report = run.report
        check_lifecycle(self.events)
        assert len(backend.jobs) == len(steps), "not every step was asked for"
        first = backend.jobs[0].prompt
        for job in backend.jobs:
            tokens = list(job.prompt.tokens)
            assert tokens[: len(first.tokens)] == list(first.tokens)
            behind = ENCODING.decode(tokens[len(first.tokens) :])
            if job.prompt.text is not None and first.text is not None:
                assert job.prompt.text == first.text + behind
            self.prompts.append(behind)
            self.constraints.append(job.constraint)
        return self

    @property
    def items(self) -> tuple[R | P | F | C, ...]:
        return items_of(self.events)

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last


def turn(choice: Choice | None = None, conversation: Conversation = WEATHER, **more: object) -> Turn:
    return replace(Turn("m", conversation, choice=choice, tenant="team"), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("told", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("per_chunk", [1, 4, 1000])
async def test_a_named_tool_is_called_behind_the_thoughts(told: Capabilities, per_chunk: int) -> None:
    said = [T + S + FINAL + "It rains.<|return|>", PARIS + "<|call|>"]
    asked = await Ask(said, turn(ONLY_WEATHER), told, per_chunk).run()
    assert asked.items == (R("Hm."), C("get_weather", PARIS))
    assert asked.prompts == ["", T + S + WEATHER_HEADER]
    assert asked.constraints == [None, JsonSchema(CITY) if told.constrain else None]
    assert asked.report.unmet == ""
    assert asked.finished.reason is FinishReason.STOP
