"""Selection of the service for a request: the engine, a pass-through deployment, or both.

A request that does not pass through is sent to the engine unchanged. For a pass-through request, the engine is used
first if the model has Harmony deployments. If these fail before any output, the original body is sent to a pass-through
deployment. Similarly, a pass-through model falls back to the engine if a gpt-oss model is configured as its substitute.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from unisono.core.answer_times import Deadline
from unisono.core.events import Event
from unisono.core.passthrough_request import AnswerMode, PassthroughRequest
from unisono.core.route_protocol import DeploymentPool
from unisono.engine.failover_policy import Action, Options, Progress, decide, failure_kind
from unisono.engine.request import BatchStream, GenerationReport, GenerationRequest, GenerationService, GenerationStream
from unisono.errors import BackendError, ContextTooLong
from unisono.passthrough.batching import BatchedEmbeddings, is_batched
from unisono.passthrough.run import PassthroughGeneration

# A deployment of the other kind can answer, but it cannot continue a partial answer.
RESTART_ONLY: Final = Options(available=True, resumable=False)
# Estimated tokens of a prompt in addition to its text.
OVERHEAD = 100


class PassthroughService(GenerationService):
    """Generation service with pass-through; `service` is the engine."""

    def __init__(self, service: GenerationService, pool: DeploymentPool) -> None:
        self._service = service
        self._pool = pool

    def start(self, request: GenerationRequest) -> GenerationStream:
        passthrough = request.passthrough
        if passthrough is None:
            return self._service.start(request)
        if passthrough.way is AnswerMode.PASSTHROUGH:
            kind = BatchedEmbeddings if is_batched(passthrough) else PassthroughGeneration
            return kind(self._pool, request, passthrough)
        return EitherGeneration(self._service, self._pool, request, passthrough)

    async def count(self, request: GenerationRequest) -> int:
        """Return the number of prompt tokens, which is an estimate unless the engine is tried first."""
        passthrough = request.passthrough
        if passthrough is None or passthrough.way is AnswerMode.ENGINE_THEN_PASSTHROUGH:
            return await self._service.count(request)
        return OVERHEAD + passthrough.tokens


class EitherGeneration(BatchStream):
    """Stream from one kind of deployment; if it fails before any output, from the other kind."""

    def __init__(
        self,
        service: GenerationService,
        pool: DeploymentPool,
        request: GenerationRequest,
        passthrough: PassthroughRequest,
    ) -> None:
        self.report = GenerationReport()
        self._service = service
        self._pool = pool
        self._request = request
        self._passthrough = passthrough

    async def _each(self) -> AsyncGenerator[list[Event]]:
        passes_first = self._passthrough.way is AnswerMode.PASSTHROUGH_THEN_ENGINE
        deadline = Deadline(asyncio.get_running_loop().time())
        has_output = False
        try:
            first = replace(
                self._request, routing=replace(self._request.routing, has_other_kind=True, deadline=deadline)
            )
            async with aclosing(self._start(first, is_passthrough=passes_first)) as stream:
                async for batch in stream:
                    has_output = True
                    yield batch
        except (BackendError, ContextTooLong) as error:
            progress = Progress.SEEN if has_output else Progress.NOTHING
            if decide(failure_kind(error), progress, RESTART_ONLY) is not Action.RETRY:
                raise
        else:
            return
        second = replace(self._request, routing=replace(self._request.routing, deadline=deadline))
        async with aclosing(self._start(second, is_passthrough=not passes_first)) as stream:
            async for batch in stream:
                yield batch

    def _start(self, request: GenerationRequest, *, is_passthrough: bool) -> GenerationStream:
        stream = (
            PassthroughGeneration(self._pool, request, self._passthrough)
            if is_passthrough
            else self._service.start(request)
        )
        stream.report = self.report
        return stream
