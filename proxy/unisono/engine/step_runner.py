"""Step runner: runs each step of an answer as one generation on a slot.

A generation continues the step's prompt and the step's tokens so far, on whichever deployment generated them.

At the end of a message it is checked, encoded again and emitted, in time proportional to its length. Long messages are
processed in a thread, so that other streams continue. Short ones are processed on the event loop, since a thread would
cost more than the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from time import monotonic
from typing import Final, TypeAlias, TypeVar

from unisono.core.conversation import Tokens
from unisono.core.events import Delta, Event
from unisono.core.generation import (
    FIRST_SPECIAL,
    Capabilities,
    CompletionJob,
    Constraint,
    FinishReason,
    OutputForm,
    Prompt,
)
from unisono.core.observer import RefusedConstraint
from unisono.core.route_protocol import Slot
from unisono.engine.abilities import check_abilities, logprob_recorder
from unisono.engine.attempt import (
    LONG_MESSAGE_TOKENS,
    PORTION_TOKENS,
    AttemptTelemetry,
    SlotSession,
    decode_text,
    portions,
    with_last_tokens,
)
from unisono.engine.deps import EngineDeps, RefusedConstraints
from unisono.engine.journal import source_of
from unisono.engine.output import OutputReader, detached, replay
from unisono.engine.prompt import continue_prompt
from unisono.engine.prompt_builder import PromptBuilder
from unisono.engine.request import BatchSink, GenerationReport, GenerationRequest
from unisono.errors import BackendError, BackendProtocolError, ConstraintRefused
from unisono.harmony.decode import Decoder
from unisono.harmony.token_counter import TokenCap

LONG_JOURNAL_TOKENS: Final = 2_000  # tokens that take a few milliseconds to replay

T = TypeVar("T")

# Events to emit per network read; the last item includes the reason that the step ended.
Generated: TypeAlias = AsyncGenerator[tuple[list[Event], FinishReason | None]]


class ConstraintTracker:
    """Constraints that the backends of one answer enforce, and those that they failed on."""

    def __init__(self, memory: RefusedConstraints, request: GenerationRequest, report: GenerationReport) -> None:
        self._memory = memory
        self._request = request
        self._report = report
        self._refused: dict[str, frozenset[str]] = {}  # constraint kinds that deployments rejected during this answer
        # The failure for which the constraint was left out; None once the backend generated a token without it.
        self._blamed: ConstraintRefused | None = None

    def enforced_kinds(self, slot: Slot, constraint: Constraint | None) -> frozenset[str]:
        """Return the constraint kinds that the slot's backend has to enforce."""
        kinds = slot.capabilities.constrain - self._refused.get(slot.deployment.name, frozenset())
        if constraint is None or constraint.kind not in kinds:
            return kinds
        if not self._memory.refuses(*self._deployment(slot), constraint):
            return kinds
        self._leave_out(slot, constraint, "remembered")
        return kinds - {constraint.kind}

    def start(self) -> None:
        """Reset the failure to blame, before a generation under a constraint."""
        self._blamed = None

    def record_token(self, slot: Slot, constraint: Constraint | None) -> None:
        """Record that a generation under `constraint` has generated its first token."""
        self._blamed = None
        if constraint is not None:
            self._memory.record_success(*self._deployment(slot), constraint)

    def record_refusal(self, slot: Slot, constraint: Constraint, error: ConstraintRefused) -> None:
        """Record that a generation under `constraint` failed; it is repeated without the constraint."""
        self._blamed = error
        self._memory.record_failure(*self._deployment(slot), constraint, error.symptom)
        self._leave_out(slot, constraint, error.symptom or "rejected")

    def record_failure(self, slot: Slot, constraint: Constraint | None, error: BackendError) -> None:
        """Record that a generation failed, possibly the repetition of one under `constraint`."""
        if self._blamed is not None and constraint is not None:
            self._memory.record_failure_without(*self._deployment(slot), constraint, self._blamed.symptom, error)

    def _deployment(self, slot: Slot) -> tuple[str, str]:
        """Return the model and the name of a deployment."""
        return self._report.served_model or self._request.model, slot.deployment.name

    def _leave_out(self, slot: Slot, constraint: Constraint, reason: str) -> None:
        """Leave out constraints of this kind on this deployment for the rest of the answer.

        The controller validates the output, as for a backend that cannot enforce constraints.
        """
        name, kind = slot.deployment.name, constraint.kind
        self._refused[name] = self._refused.get(name, frozenset()) | {kind}
        self._report.facts.refused_constraints.append(RefusedConstraint(name, reason))
        note = f"The backend did not generate under the constraint ({kind}). The output was validated afterwards."
        if note not in self._report.notes:
            self._report.notes.append(note)


class StepRunner:
    """Runs the steps of one answer on the slots of `session`.

    `has_output` is set once output was emitted to the client. `sink` takes single deltas, which are then not
    yielded.
    """

    def __init__(self, deps: EngineDeps, request: GenerationRequest, report: GenerationReport) -> None:
        self.session = SlotSession(deps.pool, request, report)
        self._deps = deps
        self._request = request
        self._report = report
        self._constraints = ConstraintTracker(deps.refused_constraints, request, report)
        self.has_output = False
        self.sink: BatchSink | None = None
        self.is_full = False  # no context window has room for another token

    async def slot(self, builder: PromptBuilder, reader: OutputReader) -> Slot:
        """Return the held slot, or acquire the next one.

        Raises the error if none is available.
        """
        if self.session.slot is not None:
            return self.session.slot
        requirements = await builder.slot_requirements(
            reader.items.context,
            reader.transcript.journal.tail,
            completed=reader.token_count,
            wants=reader.transcript.controller.requirements.constraint_kinds,
            resumes=self.has_output or reader.token_count > 0,
        )
        return await self.session.acquire(requirements)

    def restart(self) -> None:
        """Reset to the state in which only the request's journal was generated."""
        self.session.has_moved = bool(self._request.resumption.journal)

    async def step(self, builder: PromptBuilder, reader: OutputReader) -> Generated:
        """Run the current step from its current state to its end.

        No backend is used for a step that has ended or has no room. Raises ContextTooLong if another deployment may
        have room.
        """
        transcript = reader.transcript
        if reader.stop_sequence is not None or reader.is_handed_back:
            return _only([], FinishReason.STOP)
        if transcript.journal.is_ended:
            return _end(reader, FinishReason.STOP)
        if transcript.is_broken_off or self.is_full:
            return _end(reader, FinishReason.LENGTH)
        slot = await self.slot(builder, reader)
        if transcript.controller.step.last.constraint is not None:
            return self._constrained_generation(slot, builder, reader)
        return await self._generation(slot, builder, reader)

    async def _constrained_generation(self, slot: Slot, builder: PromptBuilder, reader: OutputReader) -> Generated:
        """Run a generation, and repeat it without the constraint if the backend fails on it."""
        self._constraints.start()
        while True:
            try:
                # A constraint is refused before the first token, so nothing was emitted yet.
                async with aclosing(await self._generation(slot, builder, reader)) as batches:
                    async for batch in batches:
                        yield batch
            except ConstraintRefused as error:
                constraint = reader.transcript.constraint
                if constraint is None:
                    raise
                self._constraints.record_refusal(slot, constraint, error)
            except BackendError as error:
                self._constraints.record_failure(slot, reader.transcript.controller.step.last.constraint, error)
                raise
            else:
                return

    async def _generation(self, slot: Slot, builder: PromptBuilder, reader: OutputReader) -> Generated:
        capabilities, transcript = slot.capabilities, reader.transcript
        check_abilities(self._request, capabilities)
        rendered = await builder.prompt(reader.items.context, capabilities)
        if transcript.opening is None:
            reader.start_generation(rendered.opening)
        enforced = self._constraints.enforced_kinds(slot, transcript.controller.step.last.constraint)
        if self.session.has_moved:
            transcript.resume_elsewhere(enforced)
        tail = transcript.journal.tail
        continued = await continue_prompt(
            self._deps.encoding,
            rendered,
            tail,
            capabilities,
            is_guessed=transcript.router.counter.canonical,
            has_moved=self.session.has_moved,
            is_naming=transcript.controller.step.last.naming,
        )
        spent = reader.items.context.generated + continued.tail_length - transcript.journal.inserted
        room = self._room(builder, continued.prompt, capabilities, reader, spent)
        if room < 1:
            return _end(reader, FinishReason.LENGTH)
        self.session.has_moved = False
        transcript.set_source(source_of(capabilities), enforced)
        job = self._job(continued.prompt, slot, room, reader)
        # Only the first prompt is what the client sent, so only its cached tokens are reported.
        is_first = not tail and not reader.items.context.number
        return self._read(slot, job, continued.decoder, reader, builder if is_first else None)

    def _room(
        self, builder: PromptBuilder, prompt: Prompt, capabilities: Capabilities, reader: OutputReader, spent: int
    ) -> int:
        """Return the number of tokens that may be generated after `prompt` and `spent` ones.

        Raises ContextTooLong if there is no room here, and either nothing was generated yet or another deployment may
        have room.
        """
        room = builder.room(prompt, capabilities, spent)
        limit = self._request.answer.max_tokens
        if room < 1:
            # With tokens left, only the window of this backend is full. Another one may be larger.
            may_move = (limit is None or spent < limit) and self.session.has_alternative
            if may_move or not reader.token_count:
                raise builder.too_long(prompt, capabilities)
        return room

    def _job(self, prompt: Prompt, slot: Slot, room: int, reader: OutputReader) -> CompletionJob:
        constraint, attempts = reader.transcript.constraint, reader.transcript.controller.step.last.attempts
        return CompletionJob(
            prompt=prompt,
            max_tokens=room,
            constraint=constraint,
            sampling=attempts.sampling(self._request.answer.sampling, constrained=constraint is not None),
            timeouts=self.session.start_attempt(slot),
            request_id=self._request.origin.request_id,
            cache_salt=self._request.routing.cache_salt,
            logprobs=self._request.logprobs,
            trace=self.session.trace_span(reader.items.context.number),
        )

    def _record_first_token(self, slot: Slot, job: CompletionJob) -> str:
        """Record the first token of a generation, and return the deployment that sent it."""
        deployment = self.session.record_first_token(slot)
        self._constraints.record_token(slot, job.constraint)
        return deployment

    def _hand_over(self, events: list[Event], reader: OutputReader) -> bool:
        """Give a single delta to the sink; return whether the sink took it."""
        sink = self.sink
        if sink is None or len(events) != 1 or type(events[0]) is not Delta or reader.is_stopped:
            return False
        return sink(events)

    async def _read(
        self, slot: Slot, job: CompletionJob, decoder: Decoder, reader: OutputReader, first: PromptBuilder | None
    ) -> Generated:
        """Yield the events of one generation; `first` is the builder of the first prompt."""
        transcript, stream = reader.transcript, slot.deployment.backend.complete(job)
        telemetry = AttemptTelemetry(self._report, self._request, slot, job, reader.items.context.number, stream)
        is_text = slot.capabilities.output is not OutputForm.IDS
        cap = TokenCap(self._deps.encoding, job.max_tokens, guessed=is_text)
        is_waiting, unpaused, record_pace = True, 0, telemetry.pace.record
        add_logprobs = logprob_recorder(self._request, self._report, self._deps.encoding)
        async with telemetry, slot.first_token_limit():
            async for chunk in stream:
                if is_waiting and (chunk.tokens or chunk.text):
                    telemetry.deployment, is_waiting = self._record_first_token(slot, job), False
                if chunk.cached_tokens is not None:
                    telemetry.cached = chunk.cached_tokens
                    if first is not None:
                        first.record_cached(chunk)
                tokens = await decode_text(chunk, cap, decoder) if is_text else cap.counted(chunk.tokens)
                if add_logprobs is not None:
                    add_logprobs(tokens, chunk)
                if tokens:
                    record_pace(len(tokens), monotonic())
                finish = FinishReason.LENGTH if cap.room < 0 else chunk.finish
                if finish is not None:
                    tokens = with_last_tokens(tokens, finish, chunk, cap, decoder, telemetry)
                # A single ordinary token needs neither a pause nor a thread.
                if len(tokens) == 1 and tokens[0] < FIRST_SPECIAL:
                    events = reader.feed(tokens)
                else:
                    # A read without a token emits nothing, since the journal could not record it.
                    events = []
                    for portion in portions(tokens):
                        if events and not (reader.has_pending_edit or reader.is_step_complete):
                            yield events, None
                            events = []
                        unpaused += len(portion)
                        if unpaused > PORTION_TOKENS:
                            await asyncio.sleep(0)
                            unpaused = len(portion)
                        events += await read_portion(reader, portion)
                if transcript.is_broken_off:
                    # Clients treat an answer that the gateway ends like one that reached its token limit.
                    finish = FinishReason.LENGTH
                if finish is not None:
                    yield await with_end(reader, events, finish), finish
                    return
                if (events or reader.has_pending_edit) and not self._hand_over(events, reader):
                    yield events, None
            raise BackendProtocolError("the backend ended its stream without a finish reason")


async def read_portion(reader: OutputReader, portion: Sequence[int]) -> list[Event]:
    """Return the events of a portion, which is read in a thread if that may take long."""
    # With a marker, reading may take more than a millisecond.
    if max(portion) >= FIRST_SPECIAL and reader.unsettled > LONG_MESSAGE_TOKENS:
        return await in_thread(reader, partial(reader.feed, portion))
    return reader.feed(portion)


async def replay_journal(reader: OutputReader, journal: Tokens, opening: Tokens) -> list[Event]:
    """Return the events of a journal; a long one is replayed in a thread."""
    work = partial(replay, reader, journal, opening)
    return await in_thread(reader, work) if len(journal) > LONG_JOURNAL_TOKENS else work()


async def settled(reader: OutputReader, work: Callable[[], T]) -> T:
    """Run `work`, which may settle the open message of `reader`.

    It runs in a thread if that message is long.
    """
    return await in_thread(reader, work) if reader.unsettled > LONG_MESSAGE_TOKENS else work()


async def with_end(reader: OutputReader, events: list[Event], reason: FinishReason) -> list[Event]:
    """Return the last events of a generation, with those of its end unless an edit is pending."""
    if reader.has_pending_edit:
        return events
    return events + await settled(reader, partial(reader.end_generation, reason))


async def in_thread(reader: OutputReader, work: Callable[[], T]) -> T:
    """Run `work` on `reader` in a thread."""
    # The thread continues when its caller is cancelled. It must not change a report that was already sent.
    with detached(reader):
        return await asyncio.to_thread(work)


async def _end(reader: OutputReader, reason: FinishReason) -> Generated:
    yield await settled(reader, partial(reader.end_generation, reason)), reason


async def _only(events: list[Event], reason: FinishReason) -> Generated:
    yield events, reason
