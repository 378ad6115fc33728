"""Entry point of the engine, and the loop over the steps of a Harmony answer, with failover.

An answer is generated in a loop over steps. In each step, the model continues the prompt of the step. The end of a step
determines the next action (see `steps.py`): another step, calls to server tools, or the end of the answer.

If a backend fails during a step, the next deployment continues after the last token. The reader keeps its state, so the
client sees one answer. If the next deployment cannot continue an unfinished message, the message is generated again,
provided that no part of it was emitted. If no deployment is left, the stream raises the error after the events that it
has already emitted.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Final

from unisono.core.events import Closed, Delta, Event, Finished, Repaired
from unisono.core.generation import FinishReason, Usage
from unisono.core.ids import DerivedIds
from unisono.core.passthrough_request import AnswerMode
from unisono.engine.abilities import logprob_log, note_missing_logprobs
from unisono.engine.conversation_cache import ConversationCache
from unisono.engine.deps import EngineDeps, PreparedConversation
from unisono.engine.failover_policy import ENDS_EARLY, MAX_REGENERATIONS, Action, AttemptError, Progress
from unisono.engine.output import OutputReader
from unisono.engine.prompt_builder import PromptBuilder
from unisono.engine.raw import RawGeneration, to_prompt
from unisono.engine.request import BatchStream, GenerationReport, GenerationRequest, GenerationStream
from unisono.engine.server_tools.tools import LEFT_OUT
from unisono.engine.step_runner import StepRunner, in_thread_if_long, replay_journal
from unisono.engine.steps import ContinueTurn, OpenFinal, RunTools
from unisono.errors import BackendError, CannotGoOn, ContextTooLong

CALL_AS_TEXT: Final = (
    "the model called a tool that the request does not declare or allow; the answer contains the call as text"
)


class Engine:
    """Entry point of the engine.

    The engine has no state except the caches in `deps`. If `deps.tools` is None, requests with server tools are
    refused. `salt_of` returns the cache salt for a tenant. Backends share cached prompts only between requests with the
    same salt.
    """

    def __init__(self, deps: EngineDeps, *, salt_of: Callable[[str], str] = lambda tenant: "") -> None:
        self._deps = deps
        self._salt_of = salt_of

    def start(self, request: GenerationRequest) -> GenerationStream:
        """Return a stream for the request, with the tenant's cache salt."""
        if salt := self._salt_of(request.origin.tenant):
            request = request.with_options(routing=replace(request.routing, cache_salt=salt))
        if request.raw is None:
            return HarmonyGeneration(self._deps, request)
        return RawGeneration(self._deps.encoding, self._deps.pool, request, request.raw)

    def restore(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with everything that the conversation cache adds to its prompt.

        Without `restore`, the generation adds it. A request that the engine does not render is returned unchanged.
        """
        is_passed = request.passthrough is not None and request.passthrough.way is AnswerMode.PASSTHROUGH
        return request if is_passed or request.raw is not None else self._deps.restore(request)

    async def count(self, request: GenerationRequest) -> int:
        if request.raw is not None:
            return len(await to_prompt(self._deps.encoding, request.raw, request.prompt.fields.conversation))
        return await self._deps.count(request, self._salt_of(request.origin.tenant))


class HarmonyGeneration(BatchStream):
    """A Harmony answer in progress."""

    def __init__(self, deps: EngineDeps, request: GenerationRequest) -> None:
        self.report = GenerationReport(recoveries=[*request.origin.recoveries])
        self._deps = deps
        self._request = request
        # A journal may be replayed several times, once per restart. The seed makes the call ids the same each time.
        self._seed = request.resumption.seed or (deps.new_call_id() if request.resumption.journal else "")
        self._buffered: list[Event] = []  # events that were not emitted yet
        self._lost_tokens = 0  # generated tokens that are not part of the answer
        self._regenerations = 0  # number of regenerations because no backend could continue the text

    async def _each(self) -> AsyncGenerator[list[Event]]:
        request = self._request
        runner = StepRunner(self._deps, request, self.report)
        prepared = await self._deps.prepare(request, self.report)
        reader, known = await self._new_reader(prepared)
        if request.resumption.journal:
            self._publish(reader, runner)
            yield known
        try:
            if prepared.loop is not None:
                async with aclosing(self._first_calls(prepared, runner, reader)) as batches:
                    async for batch in batches:
                        if events := self._to_emit(batch, reader, runner):
                            yield events
                # The results of approved calls belong to the conversation that the first prompt renders.
                if reader.round is not None:
                    prepared = replace(prepared, conversation=reader.round.with_results(prepared.conversation))
            builder = PromptBuilder(self._deps.renderer, request, prepared, self.report)
            is_finished = False
            while not is_finished:
                try:
                    if reader.has_pending_edit:
                        batch = await in_thread_if_long(reader, reader.apply_edit)
                        if batch and (events := self._to_emit(batch, reader, runner)):
                            yield events
                    batch, reason = [], None
                    async with aclosing(await runner.step(builder, reader)) as batches:
                        async for batch, reason in batches:
                            if reason is not None or reader.is_stopped:
                                break
                            if events := self._to_emit(batch, reader, runner):
                                yield events
                    if reader.is_done:
                        batch = [*batch, await self._finish(runner, builder, reader, reason or FinishReason.STOP)]
                        is_finished = True
                        if events := self._to_emit(batch, reader, runner):
                            yield events
                        continue
                    async with aclosing(self._end_step(prepared, runner, builder, reader, batch)) as rest:
                        async for batch in rest:
                            is_finished = bool(batch) and isinstance(batch[-1], Finished)
                            if events := self._to_emit(batch, reader, runner):
                                yield events
                except (BackendError, ContextTooLong) as error:
                    reader = await self._recover(error, prepared, runner, reader)
        finally:
            _release(self.report, reader, runner)
        if self._buffered:
            self._publish(reader, runner)
            yield self._buffered

    def _to_emit(self, batch: list[Event], reader: OutputReader, runner: StepRunner) -> list[Event]:
        """Return the events to emit after `batch` was read: buffered events and the batch, or none.

        Events that the client does not see are buffered until a visible event follows. If a backend fails before any
        part of a message was emitted, this message can therefore be generated again from its beginning.
        """
        # An answer that is not streamed is built from its items at the end, so one delta per item is enough.
        if self._request.answer.whole:
            _add_whole(batch, self._buffered)
            return []
        # The client does not see `Repaired` events while the answer is in progress.
        if not batch or (type(batch[0]) is Repaired and all(type(event) is Repaired for event in batch)):
            self._buffered += batch
            runner.sink = None
            return []
        if not runner.has_output:
            runner.has_output = True
            self._publish(reader, runner)
        if self._buffered:
            batch, self._buffered = self._buffered + batch, []
        # From now on, this method would return deltas unchanged, so the runner may send them directly to the sink.
        runner.sink = self.sink
        return batch

    async def _recover(
        self, error: AttemptError, prepared: PreparedConversation, runner: StepRunner, reader: OutputReader
    ) -> OutputReader:
        """Carry out the failover policy's action after `error`.

        Returns the reader for the next attempt. Raises `error` if the policy ends the request.
        """
        transcript = reader.transcript
        # A backend that accepts only text cannot continue inside a character, unless this character is dropped.
        continues_here = runner.session.has_slot and isinstance(error, CannotGoOn) and not reader.is_step_complete
        if continues_here and await in_thread_if_long(reader, transcript.drop_incomplete_character):
            return reader
        # Neither an answer whose server tools may have had effects nor an answer with emitted output starts over.
        can_restart = prepared.loop is None and not runner.has_output
        has_generated = can_restart and len(transcript.journal.numbers) > reader.known_length
        regenerable = self._regenerations < MAX_REGENERATIONS and (transcript.can_drop or has_generated)
        action = await runner.session.recover(
            error,
            _progress(reader, has_output=runner.has_output),
            # If the answer cannot start over, it can only continue after its last token.
            resumable=self._request.routing.failover or not (can_restart or runner.has_output),
            regenerable=regenerable,
        )
        match action:
            case Action.STOP if not reader.is_step_complete:
                runner.is_full = True
                self.report.notes.append(ENDS_EARLY)
            case Action.RESTART:
                has_slot = runner.session.has_slot
                self._regenerations += has_slot
                if not (has_slot and transcript.can_drop):
                    return await self._restart(prepared, runner, reader)
                transcript.drop_message()
            case Action.RETRY if not self._request.routing.failover and can_restart:
                return await self._restart(prepared, runner, reader)
        return reader

    async def _first_calls(
        self, prepared: PreparedConversation, runner: StepRunner, reader: OutputReader
    ) -> AsyncGenerator[list[Event]]:
        """Yield the batches that precede the first generation.

        These batches contain the lists of server tools, the calls that the client approved, and the calls that an
        interrupted process had read but not run.
        """
        runner.session.pause()
        if not self._request.resumption.journal and (lists := reader.list_tools()):
            yield lists
        async with aclosing(_tool_batches(prepared, reader)) as batches:
            async for batch in batches:
                yield batch
        runner.session.resume()

    async def _new_reader(self, prepared: PreparedConversation) -> tuple[OutputReader, list[Event]]:
        """Return a new reader, and the events from replaying the journal of the request.

        Without a journal, the reader is at the beginning of the answer, and there are no events.
        """
        request, deps, conversation = self._request, self._deps, prepared.conversation
        new_call_id = deps.new_call_id
        if self._seed:
            ids = DerivedIds(self._seed, "call")
            new_call_id = lambda: ids("call_")  # noqa: E731
        reader = OutputReader(
            deps.encoding,
            prepared.tools,
            request,
            new_call_id,
            self.report.recoveries,
            final_header=lambda: deps.renderer.opening(replace(conversation, prefill="")),
            conversation=conversation,
            hosted=prepared.hosted,
            violation=deps.violation,
            logprobs=logprob_log(request, self.report, deps.encoding),
        )
        if not request.resumption.journal:
            return reader, []
        return reader, await replay_journal(reader, request.resumption.journal, deps.renderer.opening(conversation))

    async def _restart(self, prepared: PreparedConversation, runner: StepRunner, reader: OutputReader) -> OutputReader:
        """Start over with a new reader, and count the tokens of the failed attempt as lost.

        Nothing of that attempt was emitted.
        """
        # The report must not contain the recoveries of an attempt whose output the client never sees.
        left_out = [LEFT_OUT] if prepared.has_left_out else []
        self.report.recoveries[:] = [*self._request.origin.recoveries, *left_out]
        self._buffered = []
        runner.restart()
        restarted, _ = await self._new_reader(prepared)
        self._lost_tokens += reader.token_count - restarted.token_count
        return restarted

    def _publish(self, reader: OutputReader, runner: StepRunner) -> None:
        """Copy new journal numbers to the report's journal; call this before yielding their events.

        An answer with emitted output cannot start over, so the reader then appends to the report's journal.
        """
        journal = reader.transcript.journal
        self.report.journal += journal.numbers[len(self.report.journal) :]
        if runner.has_output:
            journal.numbers = self.report.journal

    async def _end_step(
        self,
        prepared: PreparedConversation,
        runner: StepRunner,
        builder: PromptBuilder,
        reader: OutputReader,
        events: list[Event],
    ) -> AsyncGenerator[list[Event]]:
        """Yield the last `events` of a step, and the batches before the next step."""
        if reader.has_pending_edit:
            # Emit one batch: a journal can be cut only at a token, and no token separates these events.
            if events := [*events, *await in_thread_if_long(reader, reader.apply_edit)]:
                yield events
            return
        match reader.next_step:
            case RunTools():
                if events:
                    yield events
                runner.session.pause()
                async with aclosing(_tool_batches(prepared, reader)) as tool_batches:
                    async for batch in tool_batches:
                        yield batch
                runner.session.resume()
            case ContinueTurn() | OpenFinal():
                context, has_room = reader.items.next_context(reader.next_step), True
                # Errors are ignored here, because the current step is complete. If no slot is available, the next step
                # raises the error.
                with suppress(BackendError, ContextTooLong):
                    slot = await runner.slot(builder, reader)
                    has_room = await builder.has_room(context, slot.capabilities, reader.token_count)
                if not has_room:
                    yield [*events, await self._finish(runner, builder, reader, FinishReason.LENGTH)]
                    return
                # Emit one batch: a journal can be cut only at a token, and no token separates these events.
                yield [*events, *reader.start_next_step()]

    async def _finish(
        self, runner: StepRunner, builder: PromptBuilder, reader: OutputReader, reason: FinishReason
    ) -> Finished:
        """Record the answer in the conversation cache and return the last event.

        The answer is recorded first: the client may disconnect or send its next request right after the last event.
        """
        runner.session.pause()
        request = self._request
        note_missing_logprobs(request, self.report)
        _record(self._deps.memory, request, reader)
        usage = await builder.count_prompt(reader.items.context) + Usage(completion_tokens=self._lost_tokens)
        finished = reader.finish(reason, usage)
        if reader.transcript.controller.has_call_as_text:
            self.report.notes.append(CALL_AS_TEXT)
        self.report.unmet = reader.transcript.controller.obligations.unmet
        return finished


def _record(memory: ConversationCache, request: GenerationRequest, reader: OutputReader) -> None:
    """Record the answer in the conversation cache, unless a gate that may change it does this."""
    record = partial(
        memory.record,
        request.origin.tenant,
        opened=request.conversation.prefill or "",
        results=reader.items.results_by_call if reader.round is not None else None,
        visible=() if request.server_tools is None else request.server_tools.visible,
    )
    if (leave_record := request.prompt.leave_record) is not None:
        leave_record(record)
    else:
        record(reader.items.closed)


def _release(report: GenerationReport, reader: OutputReader, runner: StepRunner) -> None:
    # An answer that does not complete has no event `Finished` with its usage.
    report.facts.reasoning_tokens = reader.transcript.router.usage.reasoning_tokens
    runner.session.release()


def _add_whole(batch: list[Event], events: list[Event]) -> None:
    """Add a batch to `events`, with one delta per item, placed before its `Closed` event."""
    # One stored object per token until the end of the answer would make garbage collections slower.
    for event in batch:
        if isinstance(event, Delta):
            continue
        if isinstance(event, Closed) and event.text:
            events.append(Delta(event.item, event.text))
        events.append(event)


def _progress(reader: OutputReader, *, has_output: bool) -> Progress:
    if reader.is_step_complete:
        return Progress.COMPLETE
    if has_output:
        return Progress.SEEN
    return Progress.UNSEEN if reader.token_count else Progress.NOTHING


async def _tool_batches(prepared: PreparedConversation, reader: OutputReader) -> AsyncGenerator[list[Event]]:
    """Run the remaining calls of the current round of server tool calls, and yield the batches.

    A batch announces each call. The call runs only when the consumer requests the following batch.
    """
    loop, calls = prepared.loop, reader.round
    assert loop is not None
    assert calls is not None
    if calls.pending is not None:
        yield reader.record_outcome(await loop.run(calls, calls.pending, is_possible_repeat=True))
    while calls.calls:
        arguments = await loop.parse_arguments(calls)
        yield reader.announce_call(arguments, late=loop.is_late)
        if calls.pending is not None:
            yield reader.record_outcome(await loop.run(calls, calls.pending))
