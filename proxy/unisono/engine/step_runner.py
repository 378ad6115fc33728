"""Step runner: runs each step of an answer as one generation on a slot.

A generation continues the step's prompt and the tokens that the step has so far. A different deployment may have
generated these tokens.

A message that ends is checked, encoded again and emitted. Without a schema or grammar, this takes time proportional to
its length. Long messages are processed in a thread, so that other streams continue. Short messages are processed on the
event loop, because a thread would cost more time than the work. With a schema or grammar, the check of a short message
can take long too, so every message is processed in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from time import monotonic
from typing import Final, TypeAlias, TypeVar

from unisono.core.answer_times import Pace
from unisono.core.conversation import Tokens
from unisono.core.events import Delta, Event
from unisono.core.generation import (
    FIRST_SPECIAL,
    Capabilities,
    Chunk,
    CompletionJob,
    FinishReason,
    OutputForm,
    Prompt,
)
from unisono.core.route_protocol import Slot
from unisono.engine.abilities import check_abilities, logprob_recorder
from unisono.engine.attempt import (
    LONG_MESSAGE_TOKENS,
    PORTION_TOKENS,
    AttemptTelemetry,
    ChunkReader,
    SlotSession,
    portions,
)
from unisono.engine.deps import EngineDeps
from unisono.engine.interventions.message_gate import has_checks
from unisono.engine.interventions.refused_constraints import ConstraintTracker
from unisono.engine.journal import source_of
from unisono.engine.output import OutputReader, detached, replay
from unisono.engine.prompt import continue_prompt
from unisono.engine.prompt_builder import PromptBuilder
from unisono.engine.request import BatchSink, GenerationReport, GenerationRequest
from unisono.engine.transcript import resume_elsewhere
from unisono.errors import BackendError, BackendProtocolError, ConstraintRefused
from unisono.harmony.decode import Decoder
from unisono.harmony.max_tokens import TokenCap

LONG_JOURNAL_TOKENS: Final = 2_000  # number of tokens that take a few milliseconds to replay

T = TypeVar("T")

# Batches of events to emit. The finish reason is None, except in the last batch.
Generated: TypeAlias = AsyncGenerator[tuple[list[Event], FinishReason | None]]


class StepRunner:
    """Runs the steps of one answer on the slots of `session`.

    `has_output`: output was emitted to the client. If `sink` is set, batches of a single delta are passed to `sink`. A
    delta that `sink` accepts is not yielded.
    """

    def __init__(self, deps: EngineDeps, request: GenerationRequest, report: GenerationReport) -> None:
        self.session = SlotSession(deps.pool, request, report)
        self._deps = deps
        self._request = request
        self._report = report
        self._constraints = ConstraintTracker(deps.refused_constraints, request, report)
        self.has_output = False
        # The deltas of an answer that is emitted as a whole are dropped.
        self.sink: BatchSink | None = _drop if request.answer.whole else None
        self.is_full = False  # no context window has room for another token

    async def slot(self, builder: PromptBuilder, reader: OutputReader) -> Slot:
        """Return the held slot, or acquire the next slot.

        Raises the errors of `SlotSession.acquire` if no slot is available.
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
        """Prepare to start the answer over, from its beginning or after the request's journal."""
        self.session.has_moved = bool(self._request.resumption.journal)

    async def step(self, builder: PromptBuilder, reader: OutputReader) -> Generated:
        """Run the current step from its current state to its end.

        No backend is used if the step has ended already, or if no context window has room for another token. Raises
        ContextTooLong if the context window of this backend is full, but another deployment may have room.
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
        """Run a generation; if the backend refuses its constraint, repeat it without the constraint."""
        self._constraints.start()
        while True:
            try:
                # A backend refuses a constraint before the first token, so nothing was emitted when that happens.
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
            resume_elsewhere(transcript, enforced)
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
        # The tail does not contain stop tokens that the backend did not send.
        spent += transcript.router.counter.hidden_stops
        room = self._room(builder, continued.prompt, capabilities, reader, spent)
        if room < 1:
            return _end(reader, FinishReason.LENGTH)
        self.session.has_moved = False
        transcript.set_source(source_of(capabilities), enforced)
        callback_reader = CallbackReader(self, reader)
        takes_tokens = self._request.logprobs is None and capabilities.output is OutputForm.IDS
        job = self._job(continued.prompt, slot, room, reader, callback_reader.on_chunk if takes_tokens else None)
        # Later prompts contain output of the answer. Only the cached tokens of the first prompt are reported.
        is_first = not tail and not reader.items.context.number
        return self._read(slot, job, continued.decoder, reader, builder if is_first else None, callback_reader)

    def _room(
        self, builder: PromptBuilder, prompt: Prompt, capabilities: Capabilities, reader: OutputReader, spent: int
    ) -> int:
        """Return how many tokens may be generated after `prompt`; below 1 if no token fits.

        `spent` is the number of tokens that already count towards the request's `max_tokens`. Raises ContextTooLong if
        this backend has no room, and either nothing was generated yet or another deployment may have room.
        """
        room = builder.room(prompt, capabilities, spent)
        limit = self._request.answer.max_tokens
        self._report.facts.window_limit = spent + room if limit is None or room < limit - spent else None
        if room < 1:
            # If the request permits more tokens, only this backend's context window is full. Another deployment may
            # have a larger window.
            may_move = (limit is None or spent < limit) and self.session.has_alternative
            if may_move or not reader.token_count:
                raise builder.too_long(prompt, capabilities)
        return room

    def _job(
        self, prompt: Prompt, slot: Slot, room: int, reader: OutputReader, on_chunk: Callable[[Chunk], bool] | None
    ) -> CompletionJob:
        constraint, attempts = reader.transcript.constraint, reader.transcript.controller.step.last.attempts
        sampling = self._request.answer.sampling.for_backends()
        return CompletionJob(
            prompt=prompt,
            max_tokens=room,
            constraint=constraint,
            sampling=attempts.sampling(sampling, constrained=constraint is not None),
            timeouts=self.session.start_attempt(slot, has_output=self.has_output),
            request_id=self._request.origin.request_id,
            cache_salt=self._request.routing.cache_salt,
            logprobs=self._request.logprobs,
            trace=self.session.trace_span(reader.items.context.number),
            on_chunk=on_chunk,
        )

    def hand_over(self, events: list[Event], reader: OutputReader) -> bool:
        """Pass a single delta to the sink; return whether the sink accepted it."""
        sink = self.sink
        if sink is None or len(events) != 1 or type(events[0]) is not Delta or reader.is_stopped:
            return False
        return sink(events)

    async def _read(
        self,
        slot: Slot,
        job: CompletionJob,
        decoder: Decoder,
        reader: OutputReader,
        first: PromptBuilder | None,
        callback_reader: CallbackReader,
    ) -> Generated:
        """Yield the events of one generation; `first` is set if the prompt is the answer's first."""
        stream = slot.deployment.backend.complete(job)
        telemetry = AttemptTelemetry(self._report, self._request, slot, job, reader.items.context.number, stream)
        is_text = slot.capabilities.output is not OutputForm.IDS
        cap = TokenCap(self._deps.encoding, job.max_tokens, guessed=is_text)
        add_logprobs = logprob_recorder(self._request, self._report, self._deps.encoding)

        def record_first() -> str:
            self._constraints.record_token(slot, job.constraint)
            callback_reader.start(cap, telemetry.pace)
            return self.session.record_first_token(slot)

        chunks = ChunkReader(telemetry, cap, decoder if is_text else None, record_first, add_logprobs)
        unpaused = 0
        async with telemetry, slot.first_token_limit():
            async for chunk in stream:
                if first is not None and chunk.cached_tokens is not None:
                    first.record_cached(chunk)
                tokens, finish = await chunks.read(chunk)
                # A chunk without a token emits nothing, because the journal records only tokens and entries.
                events = callback_reader.pop_events()
                for portion in portions(tokens):
                    if events and not (reader.has_pending_edit or reader.is_step_complete):
                        yield events, None
                        events = []
                    unpaused += len(portion)
                    if unpaused > PORTION_TOKENS:
                        await asyncio.sleep(0)
                        unpaused = len(portion)
                    events += await read_portion(reader, portion)
                telemetry.uncounted = reader.transcript.journal.tokens_after_stop
                if reader.transcript.is_broken_off:
                    # An answer that the gateway ends early has the finish reason of an answer at its token limit.
                    finish = FinishReason.LENGTH
                if finish is not None:
                    yield await with_end(reader, events, finish), finish
                    return
                if (events or reader.has_pending_edit) and not self.hand_over(events, reader):
                    yield events, None
            raise BackendProtocolError("the backend ended its stream without a finish reason")


class CallbackReader:
    """Reader of one generation's tokens for `CompletionJob.on_chunk`.

    The backend calls `on_chunk` when a chunk arrives. The reader accepts no chunk before `start`, which is called when
    the first token has arrived. The reader reads only ordinary tokens, not control tokens. It holds no reference to the
    job, because the job refers to the reader.
    """

    __slots__ = ("_cap", "_events", "_pace", "_reader", "_runner")

    def __init__(self, runner: StepRunner, reader: OutputReader) -> None:
        self._runner = runner
        self._reader = reader
        self._cap: TokenCap | None = None
        self._pace = Pace()
        self._events: list[Event] = []  # events of tokens that were read, but whose events were not delivered

    def start(self, cap: TokenCap, pace: Pace) -> None:
        self._cap, self._pace = cap, pace

    def on_chunk(self, chunk: Chunk) -> bool:
        """Read the tokens of a chunk and deliver their events; return True if the chunk is done.

        If this returns False, the caller must yield the chunk to the consumer of the generation. There are two cases.
        If the tokens may take long to read or may end the generation, they are not read and stay in the chunk. If the
        tokens were read but their events could not be delivered, the tokens are removed from the chunk, and
        `pop_events` returns the events.
        """
        cap, tokens = self._cap, chunk.tokens
        if cap is None or self._runner.sink is None or chunk.finish is not None or chunk.cached_tokens is not None:
            return False
        if not 0 < len(tokens) <= min(cap.room, PORTION_TOKENS) or max(tokens) >= FIRST_SPECIAL:
            return False
        self._pace.record(len(tokens), monotonic())
        reader = self._reader
        events = reader.feed(cap.within_limit(tokens))
        has_nothing = not (events or reader.has_pending_edit)
        if not reader.transcript.is_broken_off and (has_nothing or self._runner.hand_over(events, reader)):
            return True
        chunk.tokens, self._events = (), events
        return False

    def pop_events(self) -> list[Event]:
        """Return and forget the events that `on_chunk` could not deliver."""
        events, self._events = self._events, []
        return events


def _drop(events: list[Event]) -> bool:
    return True


async def read_portion(reader: OutputReader, portion: Sequence[int]) -> list[Event]:
    """Read a portion of tokens, in a thread if this may take long, and return the events."""
    # A control token may end a message. If no answer or call is open, a single token causes no check.
    has_check = len(portion) > 1 or reader.transcript.router.can_close_answer
    if max(portion) >= FIRST_SPECIAL and may_take_long(reader, has_check=has_check):
        return await in_thread(reader, partial(reader.feed, portion))
    return reader.feed(portion)


def may_take_long(reader: OutputReader, *, has_check: bool = True) -> bool:
    """Return whether the end of a message may take more than a millisecond to process.

    `has_check` is False if the message is neither an answer nor a call, so that it is not checked.
    """
    is_long = reader.undecided_tokens > LONG_MESSAGE_TOKENS
    return is_long or (has_check and has_checks(reader.transcript.controller.requirements))


async def replay_journal(reader: OutputReader, journal: Tokens, opening: Tokens) -> list[Event]:
    """Replay a journal, in a thread if this may take long; the arguments are those of `replay`."""
    work = partial(replay, reader, journal, opening)
    is_long = len(journal) > LONG_JOURNAL_TOKENS or may_take_long(reader)
    return await in_thread(reader, work) if is_long else work()


async def in_thread_if_long(reader: OutputReader, work: Callable[[], T]) -> T:
    """Run `work`, which may process the unfinished message; in a thread if this may take long."""
    return await in_thread(reader, work) if may_take_long(reader) else work()


async def with_end(reader: OutputReader, events: list[Event], reason: FinishReason) -> list[Event]:
    """End the generation and return `events`, followed by the events of the end.

    If a prompt edit is pending, the generation is not ended here, and only `events` are returned.
    """
    if reader.has_pending_edit:
        return events
    return events + await in_thread_if_long(reader, partial(reader.end_generation, reason))


async def in_thread(reader: OutputReader, work: Callable[[], T]) -> T:
    """Run `work` on `reader` in a thread."""
    # The thread continues after its caller is cancelled. It must not change a report that consumers may already use.
    with detached(reader):
        return await asyncio.to_thread(work)


async def _end(reader: OutputReader, reason: FinishReason) -> Generated:
    yield await in_thread_if_long(reader, partial(reader.end_generation, reason)), reason


async def _only(events: list[Event], reason: FinishReason) -> Generated:
    yield events, reason
