"""Harmony generation: the loop over the steps of an answer, with failover.

An answer is a loop over steps. A step is one generation on one backend. It continues the step's prompt and the step's
tokens so far. The end of a step determines the next one (see `steps.py`), including calls of server tools.

If a backend fails, the next deployment continues after the last token: the reader keeps its state, and the client sees
one answer. A message that cannot be continued there is generated again if none of it was emitted. If no deployment is
left, the stream ends with the error after all events so far.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from unisono.core.events import Closed, Delta, Event, Finished, Repaired
from unisono.core.generation import FinishReason
from unisono.core.ids import DerivedIds
from unisono.engine.deps import EngineDeps
from unisono.engine.failover import ENDS_EARLY, MAX_REGENERATIONS, Action, AttemptError, Progress
from unisono.engine.output import OutputReader
from unisono.engine.prompt import OFF_LOOP_TOKENS, RenderedPrompt
from unisono.engine.prompt_builder import PromptBuilder
from unisono.engine.request import BatchStream, GenerationReport, GenerationRequest
from unisono.engine.server_tools.calls import ToolRound
from unisono.engine.server_tools.loop import ToolLoop
from unisono.engine.server_tools.policy import LEFT_OUT
from unisono.engine.server_tools.tools import OfferedServerTools, notes_on_left_out, offers_in, with_results
from unisono.engine.step_runner import StepRunner, in_thread, settled
from unisono.engine.steps import OpenFinal, RunTools
from unisono.errors import BackendError, CannotGoOn, ContextTooLong
from unisono.harmony.tools import plan_tools


class HarmonyGeneration(BatchStream):
    """A Harmony answer in progress."""

    def __init__(self, means: EngineDeps, turn: GenerationRequest) -> None:
        self.report = GenerationReport()
        self._means = means
        self._turn = turn
        self._tools = plan_tools(())
        self._conversation = turn.conversation
        # A journal is replayed once for each attempt, with the same call ids.
        self._seed = turn.seed or (means.new_call_id() if turn.journal else "")
        self._shown = False  # something was emitted beyond the events of the request's journal
        self._known = 0  # length of the journal before anything is generated
        self._held: list[Event] = []  # events that were not emitted yet
        self._lost = 0  # generated tokens that are not part of the answer
        self._regenerations = 0  # number of regenerations because no backend could continue the text
        self._loop: ToolLoop | None = None
        self._hosted: OfferedServerTools | None = None
        self._rendered: RenderedPrompt | None = None  # the first prompt, if a token count already rendered it

    async def _each(self) -> AsyncGenerator[list[Event]]:
        turn = self._turn
        stretch = StepRunner(self._means, turn, self.report)
        await self._prepare()
        reading, known = await self._reading()
        if turn.journal:
            self._publish(reading)
            yield known
        try:
            if self._loop is not None:
                stretch.let_go()
                async with aclosing(self._before(self._loop, reading)) as batches:
                    async for batch in batches:
                        if shown := self._showing(batch, reading, stretch):
                            yield shown
                stretch.go_on()
            asking = PromptBuilder(
                self._means.renderer, turn, self._conversation, self._tools, self.report, self._rendered
            )
            while True:
                try:
                    async with aclosing(self._answer(stretch, asking, reading)) as batches:
                        async for batch in batches:
                            if shown := self._showing(batch, reading, stretch):
                                yield shown
                except (BackendError, ContextTooLong) as error:
                    reading = await self._after(error, stretch, reading)
                else:
                    break
        finally:
            stretch.release()
        if self._held:
            self._publish(reading)
            yield self._held

    def _showing(self, batch: list[Event], reading: OutputReader, stretch: StepRunner) -> list[Event]:
        """Return the events to emit after another batch, including the buffered ones.

        Events that no client sees are buffered until a visible one follows. If an answer is cut inside a message of
        which nothing was emitted, that message is generated again from its beginning.
        """
        if self._turn.whole:
            self._held += _with_whole_deltas(batch)
            return []
        self._held += batch
        if not any(map(_is_visible, batch)):
            return []
        self._shown = stretch.shown = True
        if reading.journal is not self.report.journal:
            self._publish(reading)
        shown, self._held = self._held, []
        return shown

    async def _after(self, error: AttemptError, stretch: StepRunner, reading: OutputReader) -> OutputReader:
        """Carry out the failover policy's action for a failed attempt.

        Raises the error if the request ends.
        """
        continues_here = stretch.taken and isinstance(error, CannotGoOn) and not reading.complete
        if continues_here and await settled(reading, reading.unread):
            return reading
        can_begin_anew = self._loop is None and not self._shown
        generated_anew = can_begin_anew and len(reading.journal) > self._known
        regenerable = self._regenerations < MAX_REGENERATIONS and (reading.droppable or generated_anew)
        action = await stretch.recover(
            error,
            self._progress(reading),
            # Server tools must not run again, so the answer continues after their results.
            resumable=self._turn.failover or not (can_begin_anew or self._shown),
            regenerable=regenerable,
        )
        match action:
            case Action.STOP if not reading.complete:
                stretch.full = True
                self.report.notes.append(ENDS_EARLY)
            case Action.RESTART:
                self._regenerations += stretch.taken
                if not (stretch.taken and reading.droppable):
                    return await self._begun_anew(stretch, reading)
                reading.drop()
            case Action.RETRY if not self._turn.failover and can_begin_anew:
                return await self._begun_anew(stretch, reading)
        return reading

    def _progress(self, reading: OutputReader) -> Progress:
        if reading.complete:
            return Progress.COMPLETE
        if self._shown:
            return Progress.SEEN
        return Progress.UNSEEN if reading.completed else Progress.NOTHING

    async def _prepare(self) -> None:
        """Prepare the conversation and its tools.

        Server tools are those offered now or, with a journal, those offered when it was begun.
        """
        turn, means = self._turn, self._means
        self._loop = means.loop(turn, self.report)
        if self._loop is not None:
            offers = offers_in(turn.journal)
            self._hosted = means.hosted(turn, await self._loop.offers() if offers is None else offers)
        counted = means.counted_prompts.find(turn) if self._loop is None else None
        if counted is not None:
            prepared, self._rendered = counted.prepared, counted.rendered
        else:
            prepared = await means.prepared(turn, self._hosted)
        self._conversation, self._tools = prepared.conversation, prepared.tools
        if prepared.left_out:
            self.report.recoveries.append(LEFT_OUT)
        for server, left_out in prepared.left_out_tools.items():
            self.report.notes += notes_on_left_out(server, left_out)
            if left_out and means.log_left_out is not None:
                means.log_left_out(server, left_out)

    async def _before(self, loop: ToolLoop, reading: OutputReader) -> AsyncGenerator[list[Event]]:
        """Yield the batches that precede the first generation.

        These are the lists of server tools, approved calls, and calls that an earlier stream was about to make.
        """
        if not self._turn.journal and (listed := reading.list_tools()):
            yield listed
        async with aclosing(loop.batches(reading)) as batches:
            async for batch in batches:
                yield batch
        if reading.round is not None:
            self._conversation = with_results(self._conversation, reading.round.decided)

    async def _reading(self) -> tuple[OutputReader, list[Event]]:
        """Return a reader at the beginning or after the request's journal, and the journal's events."""
        turn, means = self._turn, self._means
        new_call_id = means.new_call_id
        if self._seed:
            ids = DerivedIds(self._seed, "call")
            new_call_id = lambda: ids("call_")  # noqa: E731
        reading = OutputReader(
            means.encoding,
            self._tools,
            turn,
            new_call_id,
            self.report.recoveries,
            final=lambda: means.renderer.opening(replace(self._conversation, prefill="")),
            round_=None if self._hosted is None else ToolRound(self._hosted, self._conversation),
            violation=means.violation,
        )
        self._known = len(turn.journal or reading.journal)
        if not turn.journal:
            return reading, []
        read_again = partial(reading.read_again, turn.journal, means.renderer.opening(self._conversation))
        if len(turn.journal) > OFF_LOOP_TOKENS:
            return reading, await in_thread(reading, read_again)
        return reading, read_again()

    async def _begun_anew(self, stretch: StepRunner, reading: OutputReader) -> OutputReader:
        """Start over with a new reader, and count the tokens of the failed attempt as lost.

        Nothing of that attempt was emitted.
        """
        self.report.recoveries.clear()
        self._held = []
        self._lost += reading.completed
        stretch.begin_anew()
        anew, _ = await self._reading()
        self._lost -= anew.completed
        return anew

    def _publish(self, reading: OutputReader) -> None:
        """Publish the tokens read so far in the report, for the batch that is yielded next.

        Once output was emitted, nothing can be withdrawn, and the reader appends to the report's journal directly.
        """
        self.report.journal += reading.journal[len(self.report.journal) :]
        if self._shown:
            reading.journal = self.report.journal

    async def _answer(
        self, stretch: StepRunner, asking: PromptBuilder, reading: OutputReader
    ) -> AsyncGenerator[list[Event]]:
        """Yield the remaining batches of the answer, in as many steps as needed."""
        while True:
            shown: list[Event] = []
            reason: FinishReason | None = None
            if reading.moves and (shown := await settled(reading, reading.turn)):
                yield shown
            async with aclosing(await stretch.step(asking, reading)) as batches:
                async for shown, reason in batches:
                    if reason is not None or reading.stop_sequence is not None or reading.moves:
                        break
                    yield shown
            if reading.moves:
                # One batch: there is no token between its events at which a journal could be cut.
                if shown := [*shown, *await settled(reading, reading.turn)]:
                    yield shown
                continue
            reason = reason or FinishReason.STOP
            if isinstance(reading.decided, RunTools) and self._loop is not None:
                if shown:
                    yield shown
                stretch.let_go()
                async with aclosing(self._loop.batches(reading)) as batches_of_tools:
                    async for batch in batches_of_tools:
                        yield batch
                stretch.go_on()
                shown = []
            elif isinstance(reading.decided, OpenFinal) and reading.stop_sequence is None:
                place = await stretch.take(asking, reading)
                if not await asking.has_room(reading.context_of_final, place.capabilities, reading.completed):
                    yield [*shown, await self._finished(stretch, asking, reading, FinishReason.LENGTH)]
                    return
                # One batch: there is no token between its events at which a journal could be cut.
                yield [*shown, *reading.go_on(reading.decided)]
                continue
            if reading.over:
                yield [*shown, await self._finished(stretch, asking, reading, reason)]
                return

    async def _finished(
        self, stretch: StepRunner, asking: PromptBuilder, reading: OutputReader, reason: FinishReason
    ) -> Finished:
        """Record the answer in the conversation cache and return the last event.

        The record precedes the event: the client may disconnect or send its next request right after the last event.
        """
        stretch.let_go()
        finished = reading.finished(reason)
        self.report.unmet = reading.plan.unmet
        self._means.memory.record(
            self._turn.tenant,
            reading.closed,
            opened=self._turn.conversation.prefill or "",
            results=reading.results_by_call if reading.round is not None else None,
            shown=() if self._turn.hosting is None else self._turn.hosting.shown,
        )
        usage = await asking.counted(reading.context) + finished.usage
        return replace(finished, usage=replace(usage, completion_tokens=usage.completion_tokens + self._lost))


def _with_whole_deltas(batch: Sequence[Event]) -> Iterator[Event]:
    """Yield the same events with a single delta for each item, before its end."""
    # One object per token until the end of the answer would prolong garbage collections.
    for event in batch:
        if isinstance(event, Closed) and event.text:
            yield Delta(event.item, event.text)
        if not isinstance(event, Delta):
            yield event


def _is_visible(event: Event) -> bool:
    """Return whether a client sees an event while the answer is in progress."""
    return not isinstance(event, Repaired)
