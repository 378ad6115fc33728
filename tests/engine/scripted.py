"""Engines on scripted backends: what the model is to say, step by step, and what was asked of it."""

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
from unisono.engine.request import GenerationReport, GenerationRequest
from unisono.engine.service import Engine
from unisono.errors import BackendUnavailable, UnisonoError
from unisono.harmony.encoding import Encoding
from unisono.harmony.render import Renderer

IDS = Capabilities(prompt=OutputForm.IDS, output=OutputForm.IDS, stop_visible=True)
TEXT = Capabilities(prompt=OutputForm.TEXT, output=OutputForm.TEXT, stop_visible=False)
ASKED = Conversation(Preamble(tools=TOOLS, date="2026-01-01"), (UserMessage("Hi"),))
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>one two three<|return|>"


@dataclass
class Step:
    """One generation: the output, then a finish or a failure."""

    output: str
    finish: FinishReason = FinishReason.STOP
    failure: UnisonoError | None = None
    cached: int | None = None


class Standing:
    """What a double is to the pool: a deployment that is its own backend, and knows of itself what it was told."""

    told: Capabilities

    @property
    def backend(self) -> Self:
        return self

    async def capabilities(self) -> Capabilities:
        return self.told

    async def probe(self) -> Probe:
        return Probe(self.told)

    async def load(self) -> None:
        """It does not say."""


@dataclass
class Scripted(Standing):
    """A deployment and its backend: plays its steps one after the other, `per_chunk` tokens or letters at a time."""

    encoding: Encoding
    steps: list[Step]
    told: Capabilities = IDS
    per_chunk: int = 4
    name: str = "scripted"
    timeouts: Timeouts = field(default_factory=Timeouts)
    jobs: list[CompletionJob] = field(default_factory=list)

    async def complete(self, job: CompletionJob) -> AsyncIterator[Chunk]:
        self.jobs.append(job)
        step = self.steps[len(self.jobs) - 1]
        if step.cached is not None:
            yield Chunk(cached_tokens=step.cached)
        whole = self.encoding.encode_as_server(step.output) if self.told.output is OutputForm.IDS else step.output
        for at in range(0, len(whole), self.per_chunk):
            part = whole[at : at + self.per_chunk]
            yield Chunk(text=part) if isinstance(part, str) else Chunk(tokens=part)
        if step.failure is not None:
            raise step.failure
        yield Chunk(finish=step.finish)

    async def aclose(self) -> None:
        pass


@dataclass
class Line:
    """A pool that tries its deployments in order, each until it fails; its routes are their own places. `taken` are the
    places that are held."""

    deployments: Sequence[Deployment]
    failures: list[UnisonoError] = field(default_factory=list)
    demands: list[RouteRequirements] = field(default_factory=list)
    taken: int = 0
    most_taken: int = 0
    well: int = 0
    """How often a place was told that all was well."""
    began: list[str] = field(default_factory=list)
    """Of every generation with a token: where it was."""
    took: list[int] = field(default_factory=list)
    """Of every generation: tokens of prompt and answer."""

    def route(self, ask: RouteRequest) -> Stand:
        return Stand(self, list(self.deployments))


@dataclass
class Stand:
    line: Line
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

    async def place(self, demand: RouteRequirements) -> Held:
        self.line.demands.append(demand)
        if not self.left:
            raise self.failure or BackendUnavailable("nobody is there")
        [deployment, *_] = self.left
        if self.failure is not None or not self.tries:
            self.tries.append(Attempt(deployment.name))
            self.failure = None
        return Held(self, deployment, await deployment.capabilities())


@dataclass
class Held:
    stand: Stand
    deployment: Deployment
    capabilities: Capabilities

    def attempt_limits(
        self, timeouts: Timeouts, *, retries_left: int, elsewhere: bool, other_kind: bool = False
    ) -> Timeouts:
        return timeouts

    def record_attempt(
        self, first_token_s: float, largest_gap_s: float | None = None, read_tokens: int | None = None
    ) -> None:
        """It learns nothing."""

    def first_token_limit(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def on_failed_probe(self, callback: Callable[[float], None] | None) -> None:
        """It is not probed."""

    def record_first_token(self) -> None:
        self.stand.line.began.append(self.deployment.name)

    def record_usage(self, tokens: int) -> None:
        self.stand.line.took.append(tokens)

    def failed(self, error: UnisonoError) -> None:
        self.stand.tries[-1] = Attempt(self.deployment.name, error.code)
        self.stand.failure = error
        self.stand.left.remove(self.deployment)
        self.stand.line.failures.append(error)

    def succeeded(self) -> None:
        self.stand.line.well += 1

    def __enter__(self) -> Held:
        self.stand.line.taken += 1
        self.stand.line.most_taken = max(self.stand.line.most_taken, self.stand.line.taken)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stand.line.taken -= 1


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
        """The engine, where JSON is checked."""
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
        conversation: Conversation = ASKED,
        *,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        calls_allowed: bool = True,
        failover: bool = True,
    ) -> Outcome:
        turn = GenerationRequest(
            "m", conversation, max_tokens=max_tokens, stop=stop, calls_allowed=calls_allowed, tenant="team"
        )
        turn = replace(turn, failover=failover)
        run = self.engine.start(turn)
        batches = [batch async for batch in run]
        assert all(batches)
        events = [event for batch in batches for event in batch]
        check_lifecycle(events)
        return Outcome(events, run.report)
