"""Attempts to generate one answer: slots, failover and telemetry.

A slot is acquired before a step if the answer holds no slot. It is released after a failed attempt, while server tools
run, and at the end of the answer. All attempts share one deadline: each attempt may take at most the time that is left
for the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from time import monotonic
from types import TracebackType
from typing import Final

from unisono.core.answer_times import Deadline, Pace
from unisono.core.error_texts import seconds
from unisono.core.generation import Chunk, CompletionJob, FinishReason, Timeouts
from unisono.core.observer import SlotWait, StepDone
from unisono.core.route_protocol import (
    NO_ROUTING,
    DeploymentPool,
    RouteRequest,
    RouteRequirements,
    Slot,
    count_failovers,
)
from unisono.core.trace_context import TraceContext, step_span, try_span
from unisono.engine.abilities import field_at_fault
from unisono.engine.failover_policy import Action, AttemptError, Options, Progress, decide, failure_kind, identity_of
from unisono.engine.request import GenerationReport, GenerationRequest
from unisono.errors import BackendTimeout, ContextTooLong, UnisonoError
from unisono.harmony.decode import Decoder
from unisono.harmony.max_tokens import TokenCap


class SlotSession:
    """Slot that one answer in progress uses, and failover to other slots."""

    def __init__(
        self, pool: DeploymentPool, request: GenerationRequest, report: GenerationReport, is_passthrough: bool = False
    ) -> None:
        """`is_passthrough`: use pass-through deployments instead of Harmony deployments."""
        self._request = request
        self._report = report
        caller = request.origin.caller
        owner = (caller is not None and caller.key) or request.origin.tenant
        identity = partial(identity_of, request)
        self._route = pool.route(
            RouteRequest(
                request.model,
                owner,
                request.routing.sticky,
                is_passthrough=is_passthrough,
                excluded=request.routing.excluded,
                identity=identity,
                requested=NO_ROUTING if caller is None else caller.routing,
                has_both_kinds=request.passthrough is not None,
                is_taken_over=request.resumption.is_taken_over,
            )
        )
        # A shortened silence limit is useful only if the answer can continue on another deployment.
        self._can_resume = request.routing.failover and not is_passthrough
        self._earlier = tuple(report.tries)
        self._now = asyncio.get_running_loop().time
        self._deadline = request.routing.deadline or Deadline(self._now())
        self.slot: Slot | None = None
        self._is_used = False
        self._timeouts: Timeouts | None = None
        # the answer's tokens so far come from another deployment or a journal
        self.has_moved = bool(request.resumption.journal)

    @property
    def has_alternative(self) -> bool:
        """Return whether another deployment can answer if the current one fails."""
        return self._route.elsewhere

    @property
    def remaining_s(self) -> float:
        """Seconds until the answer's deadline: 0 after it, infinity before the first slot."""
        # The deployment of the first slot sets the time limits.
        return inf if self._timeouts is None else self._deadline.remaining(self._timeouts, self._now()).total_s

    @property
    def has_slot(self) -> bool:
        """Return whether a slot is held."""
        return self.slot is not None

    async def acquire(self, demand: RouteRequirements) -> Slot:
        """Wait for the next slot and hold it. The session must not hold a slot yet.

        If no slot becomes available, raises the errors of `FailoverRoute.next_slot`. Raises BackendTimeout if the
        answer's time limit expires first.
        """
        slot = await self._wait_for_slot(demand, None if self._timeouts is None else self.remaining_s)
        # The slot is held until `release`, across several calls, so no `with` block can hold it.
        self.slot = slot.__enter__()
        self._is_used = False
        deployment = slot.deployment
        self._timeouts = deployment.timeouts
        self._report.model = self._request.model
        self._report.backend = deployment.name
        self._record_attempts()
        return slot

    async def _wait_for_slot(self, demand: RouteRequirements, limit_s: float | None) -> Slot:
        began_s, failure = self._report.now_s(), ""
        try:
            if limit_s is None:
                return await self._route.next_slot(demand)
            async with asyncio.timeout(limit_s):
                return await self._route.next_slot(demand)
        except TimeoutError:
            failure = BackendTimeout.code
            raise BackendTimeout(
                f"No backend became free in the {seconds(limit_s or 0.0)} that remained of the answer's time limit; "
                "try again later. The operator can raise the model's `timeout`."
            ) from None
        except UnisonoError as error:
            failure = error.code
            self._add_details(error)
            raise
        finally:
            self._report.facts.waits.append(SlotWait(began_s, self._report.now_s(), failure))

    def start_attempt(self, slot: Slot, *, has_output: bool = False) -> Timeouts:
        """Begin an attempt and return its time limits; raises BackendTimeout after the deadline."""
        configured, route = slot.deployment.timeouts, self._route
        timeouts = self._deadline.remaining(configured, self._now())
        limits = slot.attempt_timeouts(
            timeouts,
            retries_left=route.retries_left,
            elsewhere=route.elsewhere,
            # The other kind of deployment cannot continue an answer of which the client has seen a part.
            other_kind=self._request.routing.has_other_kind and not has_output,
        )
        if timeouts.total_s <= 0.0:
            raise BackendTimeout(
                f"The answer was not complete within {seconds(configured.total_s)}; if it needs more time, the "
                "operator can raise the model's `timeout`."
            )
        self._is_used = True
        return limits if self._can_resume else replace(limits, silence_s=timeouts.silence_s)

    def record_first_token(self, slot: Slot) -> str:
        """Record that the first token has arrived, and return the deployment that sent it.

        With hedging, this may be a different deployment from the one on which the attempt began.
        """
        slot.record_first_token()
        if (name := slot.deployment.name) != self._report.backend:
            self._report.backend = name
            self._record_attempts()
        return name

    def trace_span(self, step: int) -> TraceContext | None:
        """Return the trace span for the next attempt at step number `step`, or None without tracing."""
        if self._request.origin.span is None:
            return None
        return self._request.origin.span.child(step_span(step)).child(try_span(len(self._report.facts.steps)))

    async def recover(
        self, error: AttemptError, progress: Progress, *, resumable: bool, regenerable: bool = False
    ) -> Action:
        """Apply the failover policy after a failed attempt, and return the action for the caller.

        Raises `error` if the policy ends the request. Never returns WAIT: this method itself waits, and returns the
        action to take after the pause. Releases the slot, except for a RESTART on the same deployment; then `has_slot`
        is still true. `resumable` and `regenerable` are as in `Options`.
        """
        if not (self.has_slot or self._route.tries):
            # No attempt was made: `error` is the reason why no slot is available.
            raise error
        kind, remaining_s = failure_kind(error), self.remaining_s
        resumes = resumable and progress is not Progress.NOTHING
        found = self._route.prospects(error, resumes=resumes, held=self.has_slot)
        # The other kind of deployment can answer instead, unless the client has seen a part of this answer.
        can_switch = self._request.routing.has_other_kind and progress is not Progress.SEEN
        options = Options(
            available=found.available and remaining_s > 0.0,
            later=not can_switch and found.later_s is not None and found.later_s < remaining_s,
            resumable=resumable,
            regenerable=regenerable and self.has_slot,
        )
        action = decide(kind, progress, options)
        # The same deployment generates the message again, so its slot stays held and is not reported as failed. An
        # answer that the client has partly seen cannot move: another deployment would begin it anew.
        if action is Action.RESTART and (progress is Progress.SEEN or not options.available):
            return action
        self.fail(error)
        if action is Action.RAISE:
            self._add_details(error)
            raise error
        if action is Action.WAIT:
            assert found.later_s is not None
            await asyncio.sleep(found.later_s)
            self._route.retry_failed()
            # After the pause, the deployments that failed may be used again.
            return decide(kind, progress, replace(options, available=True))
        return action

    def _record_attempts(self) -> None:
        self._report.tries = (*self._earlier, *self._route.tries)
        self._report.failovers = count_failovers(self._report.tries)

    def _add_details(self, error: UnisonoError) -> None:
        """Add the field at fault to `error` and, for the operator, all failed attempts."""
        error.param = field_at_fault(error, self._request) or error.param
        # Without an attempt, the error already names the deployments whose probe failed.
        if failed := tuple((each.deployment, each.failure) for each in self._report.tries if each.failure):
            error.attempts = failed

    def fail(self, error: UnisonoError) -> None:
        """Report `error` as the failure of the held slot, if any, and release the slot."""
        if self.slot is not None:
            self.slot.failed(error)
        self._record_attempts()
        self.has_moved = True
        self.release()

    def pause(self) -> None:
        """Release the held slot, if any, as successful; stop the answer's clock until `resume`."""
        # A slot through which no request was sent is no evidence that its deployment works.
        if self.slot is not None and self._is_used:
            self.slot.succeeded()
        self.release()
        self._deadline.stop(self._now())

    def resume(self) -> None:
        """Start the answer's clock again after `pause`."""
        self._deadline.resume(self._now())

    def release(self) -> None:
        """Release the held slot, if any."""
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.__exit__(None, None, None)


class AttemptTelemetry:
    """Telemetry of one attempt to generate step number `step` on `slot`.

    The attempt begins when this object is created. Use the object as an asynchronous context manager while reading
    `stream`, the output of the attempt. On exit, the object adds the attempt to the report, reports usage and times to
    the slot, and closes the stream.
    """

    def __init__(
        self,
        report: GenerationReport,
        request: GenerationRequest,
        slot: Slot,
        job: CompletionJob,
        step: int,
        stream: AsyncIterator[Chunk],
    ) -> None:
        self._report = report
        self._records_prompts = request.prompt.records_prompts
        self._slot = slot
        self.deployment = slot.deployment.name
        self._job = job
        self._step = step
        self._stream = stream
        self._began_s = report.now_s()
        self.pace = Pace()
        self.cached: int | None = None
        self.uncounted = 0  # number of tokens that do not count as output
        self.finish = ""

    async def __aenter__(self) -> None:
        return

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = error.code if isinstance(error, UnisonoError) else ""
        if isinstance(error, ContextTooLong):
            self._add_counts(error, self._slot.capabilities.context or 0)
        self._add_to_report(failure)
        if not failure:
            self._record_times()
        self._slot.record_usage(len(self._job.prompt.tokens) + self.pace.tokens)
        if isinstance(self._stream, AsyncGenerator):
            await self._stream.aclose()

    def _add_counts(self, error: ContextTooLong, limit: int) -> None:
        """Add the gateway's token counts to a backend's error, and a missing `limit`.

        `limit` is the known context window of the backend in tokens; 0 if unknown.
        """
        prompt_tokens = len(self._job.prompt.tokens)
        error.limit = error.limit or limit
        # If the prompt alone exceeds the limit, its length is the reason, even if the backend counted other tokens.
        if prompt_tokens >= error.limit:
            error.tokens = prompt_tokens
        elif not error.tokens:
            # A backend refuses a prompt that fits if the prompt and `max_tokens` together exceed the limit.
            error.tokens = prompt_tokens + self._job.max_tokens

    def _record_times(self) -> None:
        first_at, cached = self.pace.first, self.cached
        if first_at is None:
            return
        first_token_s = first_at - self._report.began - self._began_s
        read_tokens = None if cached is None else max(len(self._job.prompt.tokens) - cached, 0)
        self._slot.record_attempt(first_token_s, self.pace.largest_gap_s or None, read_tokens)

    def _add_to_report(self, failure: str) -> None:
        pace, report, prompt = self.pace, self._report, self._job.prompt.tokens
        report.facts.steps.append(
            StepDone(
                step=self._step,
                deployment=self.deployment,
                started_s=self._began_s,
                first_token_s=None if pace.first is None else pace.first - report.began,
                ended_s=report.now_s(),
                prompt_tokens=len(prompt),
                cached_tokens=self.cached,
                generated=pace.tokens - self.uncounted,
                finish=self.finish,
                failure=failure,
                gaps=pace.gaps,
                gaps_s=pace.gaps_s,
                prompt=prompt if self._records_prompts else (),
            )
        )


# Number of tokens of a message up to which the end of the message takes at most 1 ms, with a schema of usual size.
LONG_MESSAGE_TOKENS: Final = 1_000
LONG_CHUNK_CHARS: Final = 8_000  # characters that take about 2 ms to encode
# Number of tokens inside a message that are read in less than 1 ms. Other tasks run between two portions.
PORTION_TOKENS: Final = 256


def portions(tokens: Sequence[int]) -> Iterable[Sequence[int]]:
    """Return the tokens in portions of at most `PORTION_TOKENS`."""
    if len(tokens) <= PORTION_TOKENS:
        return (tokens,) if tokens else ()
    return (tokens[begin : begin + PORTION_TOKENS] for begin in range(0, len(tokens), PORTION_TOKENS))


class ChunkReader:
    """Reader of an attempt's chunks, which decodes, limits, times and records their tokens.

    `cap` limits the number of generated tokens. `decoder` converts text to tokens; it is None if the backend sends
    token ids. `record_first` is called when the first token arrives, and returns the name of the deployment that sent
    this token. `add_logprobs` records log probabilities; it is None if the request asks for no log probabilities.
    """

    def __init__(
        self,
        telemetry: AttemptTelemetry,
        cap: TokenCap,
        decoder: Decoder | None,
        record_first: Callable[[], str],
        add_logprobs: Callable[[Sequence[int], Chunk], None] | None,
    ) -> None:
        self._cap = cap
        self._has_begun = False  # a token has arrived
        self._telemetry = telemetry
        self._decoder = decoder
        self._record_first = record_first
        self._add_logprobs = add_logprobs

    async def read(self, chunk: Chunk) -> tuple[Sequence[int], FinishReason | None]:
        """Return the tokens of a chunk, and the finish reason if the chunk is the last one."""
        telemetry, cap = self._telemetry, self._cap
        if not self._has_begun and (chunk.tokens or chunk.text):
            self._has_begun = True
            telemetry.deployment = self._record_first()
        if chunk.cached_tokens is not None:
            telemetry.cached = chunk.cached_tokens
        tokens = cap.within_limit(chunk.tokens) if self._decoder is None else await self._decode(chunk, self._decoder)
        if self._add_logprobs is not None:
            self._add_logprobs(tokens, chunk)
        if tokens:
            telemetry.pace.record(len(tokens), monotonic())
        finish = FinishReason.LENGTH if cap.room < 0 else chunk.finish
        if finish is None:
            return tokens, None
        telemetry.finish = finish.value
        # Add the tokens that the decoder has buffered, and a stop token that the backend leaves out of its output.
        buffered = () if self._decoder is None or cap.room < 0 else self._decoder.end()
        hidden_stop = () if chunk.stop_token is None or cap.room < 0 else (chunk.stop_token,)
        telemetry.pace.tokens += len(buffered) + len(hidden_stop)
        return [*tokens, *buffered, *hidden_stop], finish

    async def _decode(self, chunk: Chunk, decoder: Decoder) -> Sequence[int]:
        """Return the tokens of a text chunk, at most `cap`. Long texts are encoded in a thread."""
        # A thread continues after its caller is cancelled. It then changes only `decoder` and `cap` of this generation.
        is_long = len(chunk.text) > LONG_CHUNK_CHARS
        tokens = await asyncio.to_thread(decoder.feed, chunk) if is_long else decoder.feed(chunk)
        if self._cap.tokens_to_encode(tokens) > LONG_MESSAGE_TOKENS:
            return await asyncio.to_thread(self._cap.within_limit, tokens)
        return self._cap.within_limit(tokens)
