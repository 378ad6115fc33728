"""Worker process that times the engine for answers with requirements, with a scripted model.

It measures the generations and the time of an answer with forced calls or a schema, next to a plain answer. It also
measures the CPU time per token of the intervention controller for an answer without requirements. Each prompt must
extend the previous one up to the token where the model stopped. Otherwise the backend's prefix cache is lost, which
counts as a fault. The worker reads one `InterventionJob` per line of JSON and answers with one `InterventionResult`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median

import orjson

from bench.worker import WorkerResult, serve_lines
from unisono.core.conversation import AnswerForm, Conversation, FunctionTool, Json, Preamble, UserMessage
from unisono.core.events import Closed, Reasoning
from unisono.core.generation import CONSTRAINT_KINDS, Capabilities, Chunk, CompletionJob, FinishReason, OutputForm
from unisono.core.probe import Probe
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import EngineDeps
from unisono.engine.generation import Engine
from unisono.engine.output import transcript_of
from unisono.engine.request import AnswerOptions, Choice, ForcedCalls, GenerationRequest
from unisono.harmony.channel_router import HarmonyRouter
from unisono.harmony.encoding import load_encoding
from unisono.harmony.render import Renderer
from unisono.harmony.tool_declarations import plan_tools
from unisono.routing.deployment import LiveDeployment
from unisono.routing.pool import RoutingPool
from unisono.schemas import violation

CITY_SCHEMA: dict[str, Json] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CITY_ARGUMENTS = '{"city":"Paris"}'
REASONING = "<|channel|>analysis<|message|>" + "The user asks, and I think about it a little. " * 6 + "<|end|>"
ANSWER_START = "<|start|>assistant"
FINAL_START = REASONING + ANSWER_START + "<|channel|>final<|message|>"
TEXT_ANSWER = FINAL_START + "It rains in Paris, and it will for a while. " * 6 + "<|return|>"
JSON_ANSWER = FINAL_START + CITY_ARGUMENTS + "<|return|>"
CALL_END = CITY_ARGUMENTS + "<|call|>"
ONE_TOOL = (FunctionTool("get_weather", "The weather.", CITY_SCHEMA),)
SEVERAL_TOOLS = (
    *ONE_TOOL,
    FunctionTool("get_time", "The time.", CITY_SCHEMA),
    FunctionTool("add", "Adds.", CITY_SCHEMA),
)
ROUTER_TOKENS = 50_000


@dataclass(frozen=True, slots=True)
class InterventionCase:
    """Outputs of the model, one per generation and then repeated, and the request's options."""

    outputs: Sequence[str]
    tools: tuple[FunctionTool, ...] = ()
    choice: Choice | None = None
    form: AnswerForm | None = None
    guided: bool = False


ANSWER_FORM = AnswerForm("city", CITY_SCHEMA, strict=True)
NAMED_TOOL = ForcedCalls(frozenset({"get_weather"}))
CASES: dict[str, InterventionCase] = {
    "plain": InterventionCase((TEXT_ANSWER,), SEVERAL_TOOLS),
    "named": InterventionCase((TEXT_ANSWER, CALL_END), SEVERAL_TOOLS, NAMED_TOOL),
    "named, guided": InterventionCase((TEXT_ANSWER, CALL_END), SEVERAL_TOOLS, NAMED_TOOL, guided=True),
    "required, one tool": InterventionCase((TEXT_ANSWER, CALL_END), ONE_TOOL, ForcedCalls()),
    "required, several": InterventionCase((TEXT_ANSWER, ".get_time", CALL_END), SEVERAL_TOOLS, ForcedCalls()),
    "required, several, guided": InterventionCase(
        (TEXT_ANSWER, ".get_time", CALL_END), SEVERAL_TOOLS, ForcedCalls(), guided=True
    ),
    "schema": InterventionCase((JSON_ANSWER,), form=ANSWER_FORM),
    "schema, guided": InterventionCase((JSON_ANSWER, CITY_ARGUMENTS + "<|return|>"), form=ANSWER_FORM, guided=True),
    "schema, wrong once": InterventionCase((TEXT_ANSWER, CITY_ARGUMENTS + "<|return|>"), form=ANSWER_FORM),
}
ROUTER_VARIANTS = ("router alone", "with the plan")


@dataclass(frozen=True, slots=True)
class InterventionJob:
    """Name of a case, which is repeated `times`, or of a router variant."""

    variant: str
    times: int


@dataclass(slots=True)
class InterventionResult(WorkerResult):
    # Generations per answer.
    generations: float = 0.0
    ms_per_answer: float = 0.0
    us_per_token: float = 0.0


@dataclass
class ScriptedBackend:
    """Backend that returns its outputs in order."""

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
        """Report no load."""

    async def aclose(self) -> None:
        """Do nothing."""


async def run(job: InterventionJob) -> InterventionResult:
    result = InterventionResult()
    if job.variant in ROUTER_VARIANTS:
        result.us_per_token = min(_router_us_per_token(job.variant) for _ in range(job.times))
        return result
    case = CASES[job.variant]
    encoding = load_encoding()
    backend = ScriptedBackend([encoding.encode_marked(output) for output in case.outputs], case.guided)
    engine = Engine(
        EngineDeps(
            encoding=encoding,
            renderer=Renderer(encoding),
            pool=RoutingPool({"m": [LiveDeployment("model", backend)]}),
            memory=ConversationCache(),
            new_call_id=lambda: "call_1",
            violation=violation,
        )
    )
    preamble = Preamble(tools=case.tools, date="2026-01-01", form=case.form)
    request = GenerationRequest(
        "m",
        Conversation(preamble, (UserMessage("Is it wet?"),)),
        answer=AnswerOptions(choice=case.choice, form=case.form),
    )
    durations_ms, generations = [], 0
    for number in range(job.times):
        backend.prompts.clear()
        started_at = time.perf_counter()
        started = engine.start(replace(request, origin=replace(request.origin, request_id=str(number))))
        events = [event for batch in [batch async for batch in started] for event in batch]
        durations_ms.append(1e3 * (time.perf_counter() - started_at))
        generations += len(backend.prompts)
        if fault := find_fault(case, backend, [e for e in events if isinstance(e, Closed)], started.report.unmet):
            result.add_fault(f"{job.variant}: {fault}")
    result.ms_per_answer, result.generations = median(durations_ms), generations / job.times
    return result


def find_fault(case: InterventionCase, backend: ScriptedBackend, closed: Sequence[Closed], unmet: str) -> str:
    """Return what is wrong with an answer or its prompts, or an empty string."""
    expected = CITY_ARGUMENTS if case.choice is not None or case.form is not None else ""
    if unmet or (expected and closed[-1].text != expected):
        return unmet or f"the answer is {closed[-1].text[:60]!r}"
    if len(backend.prompts) != len(case.outputs):
        return f"{len(backend.prompts)} generations instead of {len(case.outputs)}"
    reasoning = _body_tokens(closed[0]) if isinstance(closed[0].item, Reasoning) else ()
    prefix = [*backend.prompts[0], *reasoning]
    for prompt in backend.prompts[1:]:
        if list(prompt[: len(prefix)]) != prefix:
            return "a prompt does not extend the previous prompt by its output"
    return ""


def _body_tokens(closed: Closed) -> Sequence[int]:
    """Return the tokens of a message after the start that its prompt ends with."""
    return closed.tokens[len(load_encoding().encode_marked(ANSWER_START)) :]


@cache
def _long_answer() -> list[int]:
    encoding = load_encoding()
    # The rows are numbered, because repetition would stop the answer.
    text = "".join(f"Row {row} of the list says that it is {row * 7919 % 10_007} metres. " for row in range(4_000))
    return [*encoding.encode_marked("<|channel|>final<|message|>"), *encoding.encode_text(text)[:ROUTER_TOKENS]]


def _router_us_per_token(variant: str) -> float:
    """Return the CPU time per token in microseconds; both variants write a journal."""
    encoding, tools = load_encoding(), plan_tools(())
    request = GenerationRequest("m", Conversation(Preamble(), (UserMessage("Hi"),)))
    tokens = _long_answer()
    router = HarmonyRouter(encoding, tools, lambda: "call_1")
    transcript = transcript_of(encoding, tools, request, None, lambda: "call_1", violation)
    transcript.start_step((), is_first=True)
    journal: list[int] = []
    started_at = time.process_time()
    if variant == "with the plan":
        for token in tokens:
            transcript.feed((token,))
    else:
        for token in tokens:
            journal += (token,)
            router.feed((token,))
    return 1e6 * (time.process_time() - started_at) / len(tokens)


def main() -> None:
    serve_lines(lambda line: run(InterventionJob(**orjson.loads(line))))


if __name__ == "__main__":
    main()
