"""Answers that were asked for in a way of their own, in front of no server: the engine and a model by script.

How many generations an answer takes, and how long, against a plain one; and what the plan costs per token where nothing
is asked for. Every prompt has to extend the one before it, token by token, up to where the model was stopped: else the
backend's prefix cache is lost, which is a fault. A process of its own, driven by lines of JSON: one `Ask` in, one
`Told` out.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median

import orjson

from bench.tally import Tally, answer_lines
from unisono.core.conversation import AnswerForm, Conversation, FunctionTool, Json, Preamble, UserMessage
from unisono.core.events import Closed, Reasoning
from unisono.core.generation import CONSTRAINT_KINDS, Capabilities, Chunk, CompletionJob, FinishReason, OutputForm
from unisono.core.probe import Probe
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import EngineDeps
from unisono.engine.output import transcript_of
from unisono.engine.request import AnswerOptions, Choice, ForcedCalls, GenerationRequest
from unisono.engine.service import Engine
from unisono.harmony.encoding import load_encoding
from unisono.harmony.render import Renderer
from unisono.harmony.router import HarmonyRouter
from unisono.harmony.tools import plan_tools
from unisono.routing.deployment import LiveDeployment
from unisono.routing.pool import RoutingPool
from unisono.schemas import violation

CITY: dict[str, Json] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
PLACE = '{"city":"Paris"}'
THOUGHT = "<|channel|>analysis<|message|>" + "The user asks, and I think about it a little. " * 6 + "<|end|>"
START = "<|start|>assistant"
FINAL = THOUGHT + START + "<|channel|>final<|message|>"
PROSE = FINAL + "It rains in Paris, and it will for a while. " * 6 + "<|return|>"
JSON = FINAL + PLACE + "<|return|>"
CALL = PLACE + "<|call|>"
ONE = (FunctionTool("get_weather", "The weather.", CITY),)
SEVERAL = (*ONE, FunctionTool("get_time", "The time.", CITY), FunctionTool("add", "Adds.", CITY))
ROUTED_TOKENS = 50_000


@dataclass(frozen=True, slots=True)
class Case:
    """`outputs` is what the model says, generation by generation, and then again."""

    outputs: Sequence[str]
    tools: tuple[FunctionTool, ...] = ()
    choice: Choice | None = None
    form: AnswerForm | None = None
    guided: bool = False


FORM = AnswerForm("city", CITY, strict=True)
NAMED = ForcedCalls(frozenset({"get_weather"}))
CASES: dict[str, Case] = {
    "plain": Case((PROSE,), SEVERAL),
    "named": Case((PROSE, CALL), SEVERAL, NAMED),
    "named, guided": Case((PROSE, CALL), SEVERAL, NAMED, guided=True),
    "required, one tool": Case((PROSE, CALL), ONE, ForcedCalls()),
    "required, several": Case((PROSE, ".get_time", CALL), SEVERAL, ForcedCalls()),
    "required, several, guided": Case((PROSE, ".get_time", CALL), SEVERAL, ForcedCalls(), guided=True),
    "schema": Case((JSON,), form=FORM),
    "schema, guided": Case((JSON, PLACE + "<|return|>"), form=FORM, guided=True),
    "schema, wrong once": Case((PROSE, PLACE + "<|return|>"), form=FORM),
}
ROUTES = ("router alone", "with the plan")


@dataclass(frozen=True, slots=True)
class Ask:
    """One of the cases, so many `times`; or one of the routes."""

    how: str
    times: int


@dataclass(slots=True)
class Told(Tally):
    generations: float = 0.0
    """Per answer."""
    ms_per_answer: float = 0.0
    us_per_token: float = 0.0


@dataclass
class Model:
    """A backend that says its outputs one after the other."""

    outputs: Sequence[Sequence[int]]
    guided: bool
    prompts: list[Sequence[int]] = field(default_factory=list)

    async def probe(self) -> Probe:
        constrain = frozenset(CONSTRAINT_KINDS) if self.guided else frozenset[str]()
        return Probe(Capabilities(OutputForm.IDS, OutputForm.IDS, stop_visible=True, constrain=constrain))

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        output = self.outputs[len(self.prompts) % len(self.outputs)]
        self.prompts.append(job.prompt.tokens)
        for token in output:
            yield Chunk(tokens=(token,))
        yield Chunk(finish=FinishReason.STOP)

    async def load(self) -> None:
        """It does not say."""

    async def aclose(self) -> None:
        """There is nothing to close."""


async def run(ask: Ask) -> Told:
    told = Told()
    if ask.how in ROUTES:
        told.us_per_token = min(_routed(ask.how) for _ in range(ask.times))
        return told
    case = CASES[ask.how]
    encoding = load_encoding()
    model = Model([encoding.encode_marked(output) for output in case.outputs], case.guided)
    engine = Engine(
        EngineDeps(
            encoding=encoding,
            renderer=Renderer(encoding),
            pool=RoutingPool({"m": [LiveDeployment("model", model)]}),
            memory=ConversationCache(),
            new_call_id=lambda: "call_1",
            violation=violation,
        )
    )
    preamble = Preamble(tools=case.tools, date="2026-01-01", form=case.form)
    turn = GenerationRequest(
        "m",
        Conversation(preamble, (UserMessage("Is it wet?"),)),
        answer=AnswerOptions(choice=case.choice, form=case.form),
    )
    taken, generations = [], 0
    for number in range(ask.times):
        model.prompts.clear()
        begun = time.perf_counter()
        started = engine.start(replace(turn, origin=replace(turn.origin, request_id=str(number))))
        events = [event for batch in [batch async for batch in started] for event in batch]
        taken.append(1e3 * (time.perf_counter() - begun))
        generations += len(model.prompts)
        if fault := wrong(case, model, [e for e in events if isinstance(e, Closed)], started.report.unmet):
            told.fault(f"{ask.how}: {fault}")
    told.ms_per_answer, told.generations = median(taken), generations / ask.times
    return told


def wrong(case: Case, model: Model, closed: Sequence[Closed], unmet: str) -> str:
    """What is wrong with an answer, and with the prompts it took; empty for nothing."""
    wanted = PLACE if case.choice is not None or case.form is not None else ""
    if unmet or (wanted and closed[-1].text != wanted):
        return unmet or f"the answer is {closed[-1].text[:60]!r}"
    if len(model.prompts) != len(case.outputs):
        return f"{len(model.prompts)} generations, not {len(case.outputs)}"
    thought = _said(closed[0]) if isinstance(closed[0].item, Reasoning) else ()
    kept = [*model.prompts[0], *thought]
    for prompt in model.prompts[1:]:
        if list(prompt[: len(kept)]) != kept:
            return "a prompt does not extend the one before it by what was said"
    return ""


def _said(closed: Closed) -> Sequence[int]:
    """A message's tokens behind the start that its prompt ends in."""
    return closed.tokens[len(load_encoding().encode_marked(START)) :]


@cache
def _long_answer() -> list[int]:
    encoding = load_encoding()
    # Numbered, since nothing is to repeat itself.
    text = "".join(f"Row {row} of the list says that it is {row * 7919 % 10_007} metres. " for row in range(4_000))
    return [*encoding.encode_marked("<|channel|>final<|message|>"), *encoding.encode_text(text)[:ROUTED_TOKENS]]


def _routed(how: str) -> float:
    """Microseconds of CPU per token that comes by itself, and is kept in a journal either way."""
    encoding, tools = load_encoding(), plan_tools(())
    turn = GenerationRequest("m", Conversation(Preamble(), (UserMessage("Hi"),)))
    tokens = _long_answer()
    router = HarmonyRouter(encoding, tools, lambda: "call_1")
    transcript = transcript_of(encoding, tools, turn, None, lambda: "call_1", violation)
    transcript.start_step((), is_first=True)
    journal: list[int] = []
    begun = time.process_time()
    if how == "with the plan":
        for token in tokens:
            transcript.feed((token,))
    else:
        for token in tokens:
            journal += (token,)
            router.feed((token,))
    return 1e6 * (time.process_time() - begun) / len(tokens)


def main() -> None:
    answer_lines(lambda line: run(Ask(**orjson.loads(line))))


if __name__ == "__main__":
    main()
