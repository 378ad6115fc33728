"""Engines on scripted backends: what the model is to say, step by step, and what was asked of it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from tests.harmony.fold import check_lifecycle
from tests.harmony.recoveries import TOOLS
from unisono.core.conversation import Conversation, Preamble, UserMessage
from unisono.core.events import Event, Finished
from unisono.core.generation import Capabilities, Chunk, FinishReason, Form, Generation, Timeouts
from unisono.core.ports import Deployment
from unisono.core.probe import Probe
from unisono.engine.engine import Engine
from unisono.engine.memory import TurnMemory
from unisono.engine.turn import Report, Turn
from unisono.engine.wishes import Violation
from unisono.errors import UnisonoError
from unisono.harmony.encoding import Encoding
from unisono.harmony.render import Renderer

IDS = Capabilities(prompt=Form.IDS, output=Form.IDS, stop_visible=True)
TEXT = Capabilities(prompt=Form.TEXT, output=Form.TEXT, stop_visible=False)
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


@dataclass
class Scripted:
    """A deployment and its backend: plays its steps one after the other, `per_chunk` tokens or letters at a time."""

    encoding: Encoding
    steps: list[Step]
    told: Capabilities = IDS
    per_chunk: int = 4
    name: str = "scripted"
    timeouts: Timeouts = field(default_factory=Timeouts)
    jobs: list[Generation] = field(default_factory=list)

    @property
    def backend(self) -> Scripted:
        return self

    async def capabilities(self) -> Capabilities:
        return self.told

    async def probe(self) -> Probe:
        return Probe(self.told)

    async def complete(self, job: Generation) -> AsyncIterator[Chunk]:
        self.jobs.append(job)
        step = self.steps[len(self.jobs) - 1]
        if step.cached is not None:
            yield Chunk(cached_tokens=step.cached)
        whole = self.encoding.encode_as_server(step.output) if self.told.output is Form.IDS else step.output
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
    """A pool that tries its deployments in order."""

    deployments: Sequence[Deployment]
    failures: list[UnisonoError] = field(default_factory=list)

    def choose(self, model: str, sticky: str = "") -> Sequence[Deployment]:
        return self.deployments

    def failed(self, deployment: Deployment, error: UnisonoError) -> None:
        self.failures.append(error)

    def succeeded(self, deployment: Deployment) -> None:
        pass


@dataclass
class Outcome:
    events: list[Event]
    report: Report

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
        self.memory = TurnMemory()
        self.engine = Engine(
            encoding=encoding,
            renderer=Renderer(encoding),
            pool=self.pool,
            memory=self.memory,
            new_call_id=self.new_call_id,
        )

    def engine_with(self, violation: Violation) -> Engine:
        """The engine, where JSON is checked."""
        return Engine(
            encoding=self.encoding,
            renderer=Renderer(self.encoding),
            pool=self.pool,
            memory=self.memory,
            new_call_id=self.new_call_id,
            violation=violation,
        )

    async def ask(
        self,
        conversation: Conversation = ASKED,
        *,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        calls_allowed: bool = True,
    ) -> Outcome:
        turn = Turn("m", conversation, max_tokens=max_tokens, stop=stop, calls_allowed=calls_allowed, tenant="team")
        run = self.engine.start(turn)
        batches = [batch async for batch in run]
        assert all(batches)
        events = [event for batch in batches for event in batch]
        check_lifecycle(events)
        return Outcome(events, run.report)
