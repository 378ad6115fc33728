"""Engines on scripted backends that record the jobs they receive."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from tests.harmony.fold import check_lifecycle
from tests.harmony.recoveries import TOOLS
from unisono.core.conversation import Conversation, Preamble, UserMessage
from unisono.core.events import Event, Finished
from unisono.core.generation import Capabilities, Chunk, CompletionJob, FinishReason, OutputForm, Timeouts
from unisono.core.ports import Deployment, Violation
from unisono.core.probe import Probe
from unisono.core.route_protocol import Attempt, Prospects, RouteRequest, RouteRequirements
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import EngineDeps
from unisono.engine.generation import Engine
from unisono.engine.request import AnswerOptions, GenerationReport, GenerationRequest, RequestOrigin
from unisono.errors import BackendUnavailable, UnisonoError
from unisono.harmony.encoding import Encoding
from unisono.harmony.render import Renderer

IDS = Capabilities(prompt=OutputForm.IDS, output=OutputForm.IDS, stop_visible=True)
TEXT = Capabilities(prompt=OutputForm.TEXT, output=OutputForm.TEXT, stop_visible=False)
CONVERSATION = Conversation(Preamble(tools=TOOLS, date="2026-01-01"), (UserMessage("Hi"),))
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>one two three<|return|>"


@dataclass
class Step:
    """Script of one generation: the output, then a finish reason or a failure."""

    output: str
    finish: FinishReason = FinishReason.STOP
    failure: UnisonoError | None = None
    cached: int | None = None


class DeploymentDouble:
    """Base of test doubles: a deployment that is its own backend and reports fixed capabilities."""

    caps: Capabilities

    @property
    def backend(self) -> Self:
        return self

    async def capabilities(self) -> Capabilities:
        return self.caps

    async def probe(self) -> Probe:
        return Probe(self.caps)

    async def load(self) -> None:
        """Return None, since a double does not report its load."""


@dataclass
class Scripted(DeploymentDouble):
    """Deployment and backend that play steps in order; `per_chunk` is in tokens or characters."""

    encoding: Encoding
    steps: list[Step]
    caps: Capabilities = IDS
    per_chunk: int = 4
    name: str = "scripted"
    timeouts: Timeouts = field(default_factory=Timeouts)
    jobs: list[CompletionJob] = field(default_factory=list)
    offers: bool = False  # offer each chunk to the job's `on_chunk` first

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        self.jobs.append(job)
        async for chunk in self._chunks(self.steps[len(self.jobs) - 1]):
            if not (self.offers and job.on_chunk is not None and chunk.finish is None and job.on_chunk(chunk)):
                yield chunk

    async def _chunks(self, step: Step) -> AsyncIterator[Chunk]:
        if step.cached is not None:
            yield Chunk(cached_tokens=step.cached)
        output = self.encoding.encode_as_server(step.output) if self.caps.output is OutputForm.IDS else step.output
        for position in range(0, len(output), self.per_chunk):
            piece = output[position : position + self.per_chunk]
            yield Chunk(text=piece) if isinstance(piece, str) else Chunk(tokens=piece)
        if step.failure is not None:
            raise step.failure
        yield Chunk(finish=step.finish)

    async def aclose(self) -> None:
        pass


@dataclass
class Line:
    """Pool that tries its deployments in order, each until it fails."""

    deployments: Sequence[Deployment]
    failures: list[UnisonoError] = field(default_factory=list)
    demands: list[RouteRequirements] = field(default_factory=list)
    slots_in_use: int = 0
    max_slots_in_use: int = 0
    successes: int = 0  # generations reported as successful
    # Deployment name of each generation with at least one token.
    first_tokens: list[str] = field(default_factory=list)
    # Prompt and output tokens of each generation.
    token_counts: list[int] = field(default_factory=list)

    def route(self, ask: RouteRequest) -> LineRoute:
        return LineRoute(self, list(self.deployments))


@dataclass
class LineRoute:
    pool: Line
    left: list[Deployment]
    tries: list[Attempt] = field(default_factory=list)
    failure: UnisonoError | None = None

    @property
    def retries_left(self) -> int:
        return len(self.left) - 1

    @property
    def elsewhere(self) -> bool:
        return len(self.left) > 1

    def prospects(self, error: UnisonoError, *, resumes: bool, held: bool) -> Prospects:
        return Prospects(available=len(self.left) > held)

    def retry_failed(self) -> None:
        raise AssertionError("no pause was offered")

    async def next_slot(self, demand: RouteRequirements) -> LineSlot:
        self.pool.demands.append(demand)
        if not self.left:
            raise self.failure or BackendUnavailable("no deployment is left")
        [deployment, *_] = self.left
        if self.failure is not None or not self.tries:
            self.tries.append(Attempt(deployment.name))
            self.failure = None
        return LineSlot(self, deployment, await deployment.capabilities())


@dataclass
class LineSlot:
    route: LineRoute
    deployment: Deployment
    capabilities: Capabilities

    def attempt_timeouts(
        self, timeouts: Timeouts, *, retries_left: int, elsewhere: bool, other_kind: bool = False
    ) -> Timeouts:
        return timeouts

    def record_attempt(
        self, first_token_s: float, largest_gap_s: float | None = None, read_tokens: int | None = None
    ) -> None:
        """Ignore the times."""

    def first_token_limit(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def on_failed_probe(self, callback: Callable[[float], None] | None) -> None:
        """Ignore the callback, since deployments are not probed."""

    def record_first_token(self) -> None:
        self.route.pool.first_tokens.append(self.deployment.name)

    def record_usage(self, tokens: int) -> None:
        self.route.pool.token_counts.append(tokens)

    def failed(self, error: UnisonoError) -> None:
        self.route.tries[-1] = Attempt(self.deployment.name, error.code)
        self.route.failure = error
        self.route.left.remove(self.deployment)
        self.route.pool.failures.append(error)

    def succeeded(self) -> None:
        self.route.pool.successes += 1

    def __enter__(self) -> LineSlot:
        self.route.pool.slots_in_use += 1
        self.route.pool.max_slots_in_use = max(self.route.pool.max_slots_in_use, self.route.pool.slots_in_use)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.route.pool.slots_in_use -= 1


@dataclass
class Outcome:
    events: list[Event]
    report: GenerationReport

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last


class Runner:
    def __init__(self, encoding: Encoding, *backends: Scripted) -> None:
        ids = itertools.count()
        self.encoding = encoding
        self.pool = Line(backends)
        self.new_call_id: Callable[[], str] = lambda: f"call_{next(ids)}"
        self.memory = ConversationCache()
        self.engine = Engine(
            EngineDeps(
                encoding=encoding,
                renderer=Renderer(encoding),
                pool=self.pool,
                memory=self.memory,
                new_call_id=self.new_call_id,
            )
        )

    def engine_with(self, violation: Violation) -> Engine:
        """Return an engine that validates JSON with `violation`."""
        return Engine(
            EngineDeps(
                encoding=self.encoding,
                renderer=Renderer(self.encoding),
                pool=self.pool,
                memory=self.memory,
                new_call_id=self.new_call_id,
                violation=violation,
            )
        )

    async def ask(
        self,
        conversation: Conversation = CONVERSATION,
        *,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        calls_allowed: bool = True,
        failover: bool = True,
    ) -> Outcome:
        request = GenerationRequest(
            "m",
            conversation,
            answer=AnswerOptions(max_tokens=max_tokens, stop=stop, calls_allowed=calls_allowed),
            origin=RequestOrigin(tenant="team"),
        )
        request = replace(request, routing=replace(request.routing, failover=failover))
        run = self.engine.start(request)
        batches = [batch async for batch in run]
        assert all(batches)
        events = [event for batch in batches for event in batch]
        check_lifecycle(events)
        return Outcome(events, run.report)
