"""Who answers a turn: the engine, a deployment that answers in OpenAI's own API, or one after the other.

Turns that do not pass through reach the engine untouched. Of the others, the engine is asked first wherever the model
has deployments that speak Harmony; what these fail with, while nothing was shown, sends the original body on. A model
that passes through goes to the engine in the same way where a gpt-oss stands in for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from unisono.core.deadline import Deadline
from unisono.core.events import Event
from unisono.core.passthrough_request import AnswerMode, PassthroughRequest
from unisono.core.route_protocol import DeploymentPool
from unisono.engine.failover import Action, Options, Progress, decide, failure_kind
from unisono.engine.turn import BatchStream, GenerationReport, GenerationRequest, GenerationService, GenerationStream
from unisono.errors import BackendError, ContextTooLong
from unisono.passthrough.run import PassthroughGeneration

BEGINS_ANEW: Final = Options(available=True, resumable=False)
"""The other kind of deployment can answer, but only from the beginning."""
OVERHEAD = 100
"""Tokens of a prompt besides its text, as they are guessed."""


class PassthroughService(GenerationService):
    """`turns` are the engine's."""

    def __init__(self, turns: GenerationService, pool: DeploymentPool) -> None:
        self._turns = turns
        self._pool = pool

    def start(self, turn: GenerationRequest) -> GenerationStream:
        passage = turn.passage
        if passage is None:
            return self._turns.start(turn)
        if passage.way is AnswerMode.PASSING:
            return PassthroughGeneration(self._pool, turn, passage)
        return EitherGeneration(self._turns, self._pool, turn, passage)

    async def count(self, turn: GenerationRequest) -> int:
        """Of a turn that only passes through it is a guess."""
        passage = turn.passage
        if passage is None or passage.way is AnswerMode.ENGINE_THEN_PASSING:
            return await self._turns.count(turn)
        return OVERHEAD + passage.tokens


class EitherGeneration(BatchStream):
    """A run of the one, and where it fails with nothing shown, of the other."""

    def __init__(
        self, turns: GenerationService, pool: DeploymentPool, turn: GenerationRequest, passage: PassthroughRequest
    ) -> None:
        self.report = GenerationReport()
        self._turns = turns
        self._pool = pool
        self._turn = turn
        self._passage = passage

    async def _each(self) -> AsyncGenerator[list[Event]]:
        passes_first = self._passage.way is AnswerMode.PASSING_THEN_ENGINE
        deadline = Deadline(asyncio.get_running_loop().time())
        shown = False
        try:
            first = replace(self._turn, has_other_kind=True, deadline=deadline)
            async with aclosing(self._run(first, passing=passes_first)) as run:
                async for batch in run:
                    shown = True
                    yield batch
        except (BackendError, ContextTooLong) as error:
            progress = Progress.SEEN if shown else Progress.NOTHING
            if decide(failure_kind(error), progress, BEGINS_ANEW) is not Action.RETRY:
                raise
        else:
            return
        # What was tried counts, whoever goes on.
        self.report.failovers += bool(self.report.tries)
        second = replace(self._turn, deadline=deadline)
        async with aclosing(self._run(second, passing=not passes_first)) as run:
            async for batch in run:
                yield batch

    def _run(self, turn: GenerationRequest, *, passing: bool) -> GenerationStream:
        run = PassthroughGeneration(self._pool, turn, self._passage) if passing else self._turns.start(turn)
        run.report = self.report
        return run
