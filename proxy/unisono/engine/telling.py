"""Telemetry of one attempt: measured while it runs, and added to the report at its end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from unisono.core.generation import Chunk, CompletionJob, FinishReason
from unisono.core.observer import Pace, StepDone
from unisono.core.route_protocol import Slot
from unisono.engine.turn import GenerationReport, GenerationRequest
from unisono.errors import ContextTooLong, UnisonoError


class AttemptTelemetry:
    """Telemetry of an attempt that begins now on `deployment`, for step number `step`."""

    def __init__(
        self, report: GenerationReport, turn: GenerationRequest, deployment: str, job: CompletionJob, step: int
    ) -> None:
        self._report = report
        self._recorded = turn.recorded
        self._deployment = deployment
        self._job = job
        self._step = step
        self._began_s = report.now_s()
        self.pace = Pace()
        self.cached: int | None = None
        self.finish = ""
        self.failure = ""

    def came(self, chunk: Chunk, tokens: int, now: float) -> None:
        """Record a chunk with `tokens` tokens, received at `now` by the monotonic clock."""
        if tokens:
            self.pace.came(tokens, now)
        if chunk.cached_tokens is not None:
            self.cached = chunk.cached_tokens

    def ended(self, reason: FinishReason, unseen: int) -> None:
        """Record the backend's finish reason, and `unseen` generated tokens that it did not send."""
        self.finish = reason.value
        self.pace.tokens += unseen

    @asynccontextmanager
    async def reading(self, stream: AsyncIterator[Chunk], place: Slot) -> AsyncGenerator[None]:
        """Measure the attempt while `stream` is read.

        At its end, add it to the report, inform the slot, and close the stream.
        """
        try:
            async with place.first_token_limit():
                yield
        except UnisonoError as error:
            self.failure = error.code
            if isinstance(error, ContextTooLong):
                self._add_counts(error, place.capabilities.context or 0)
            raise
        finally:
            self._over()
            self._record_times(place)
            place.took(len(self._job.prompt.tokens) + self.pace.tokens)
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()

    def _add_counts(self, error: ContextTooLong, limit: int) -> None:
        """Add the gateway's own counts to a backend's report.

        The limit that the backend reports takes precedence.
        """
        prompt_tokens = len(self._job.prompt.tokens)
        error.limit = error.limit or limit
        if prompt_tokens >= error.limit:
            error.tokens = prompt_tokens
        elif not error.tokens:
            # A prompt that fits is refused when it leaves too little room for the output.
            error.tokens = prompt_tokens + self._job.max_tokens

    def _record_times(self, place: Slot) -> None:
        first_at, cached = self.pace.first, self.cached
        if first_at is None or self.failure:
            return
        first_token_s = first_at - self._report.began - self._began_s
        read_tokens = None if cached is None else max(len(self._job.prompt.tokens) - cached, 0)
        place.record_attempt(first_token_s, self.pace.largest_gap_s or None, read_tokens)

    def _over(self) -> None:
        pace, report = self.pace, self._report
        prompt = self._job.prompt.tokens
        report.facts.steps.append(
            StepDone(
                step=self._step,
                deployment=self._deployment,
                began_s=self._began_s,
                first_token_s=None if pace.first is None else pace.first - report.began,
                ended_s=report.now_s(),
                prompt_tokens=len(prompt),
                cached_tokens=self.cached,
                generated=pace.tokens,
                finish=self.finish,
                failure=self.failure,
                gaps=pace.gaps,
                gaps_s=pace.gaps_s,
                prompt=prompt if self._recorded else (),
            )
        )
