"""Reader of an answer: converts tokens to events, and writes the journal.

Tokens from a backend and tokens from a journal are processed by the same code. They therefore produce the same events,
call ids, counts and next steps. The same is true for the results of tools. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from unisono.core.conversation import Conversation, Tokens
from unisono.core.emitted_logprobs import LogprobLog, counted, record_texts
from unisono.core.events import Closed, Delta, Event, Finished, Repaired
from unisono.core.generation import FinishReason, Usage
from unisono.core.ports import Violation
from unisono.core.server_tool_arguments import ToolArguments
from unisono.engine.interventions.controller import InterventionController
from unisono.engine.interventions.message_gate import MessageGate
from unisono.engine.interventions.requirements import requirements_of
from unisono.engine.interventions.stop_strings import StopStrings
from unisono.engine.journal import NOTED, JournalEntry, JournalMarker, TokenSource, parts_of
from unisono.engine.request import GenerationRequest
from unisono.engine.server_tools.calls import CALL, CallOutcome, Note, ToolRound
from unisono.engine.server_tools.tools import LISTED, OfferedServerTools, decided_calls
from unisono.engine.steps import (
    ANSWER_DONE,
    INITIAL_STATE,
    LATE_CALL,
    AnswerDone,
    AnswerItems,
    AnswerState,
    ContinueTurn,
    Generate,
    OpenFinal,
    RunTools,
    ServerToolFilter,
    Step,
    next_step,
)
from unisono.engine.transcript import Transcript, replay_entry
from unisono.errors import StoreUnreadable
from unisono.harmony.channel_router import HarmonyRouter
from unisono.harmony.encoding import Encoding, share_ids
from unisono.harmony.recipients import FUNCTIONS
from unisono.harmony.tool_declarations import ToolSet

UNFIT_JOURNAL = "The stored part of this answer does not fit its request; send a new request."


class OutputReader:
    """Reader of one answer, step by step.

    Call order for each step: `start_generation`, `transcript.set_source`, `feed` (repeatedly), `end_generation`. Then
    act on `next_step`: call `start_next_step`, or run the calls of `round`. `final_header` returns the tokens that open
    a message on the channel `final`. The reader adds the rule name of each recovery to `recoveries` once.
    """

    def __init__(
        self,
        encoding: Encoding,
        tools: ToolSet,
        request: GenerationRequest,
        new_call_id: Callable[[], str],
        recoveries: list[str],
        *,
        final_header: Callable[[], Tokens],
        conversation: Conversation,
        hosted: OfferedServerTools | None = None,
        violation: Violation | None = None,
        logprobs: LogprobLog | None = None,
    ) -> None:
        self.transcript = transcript_of(encoding, tools, request, hosted, new_call_id, violation)
        self.round = None if hosted is None else ToolRound(hosted, conversation)  # calls that run after the last step
        self._filter = (
            None if hosted is None else ServerToolFilter(hosted, parallel_calls=request.answer.parallel_calls)
        )
        rejects_preambles = self.transcript.controller.requirements.rejects_dangling_preambles
        self.items = AnswerItems(self._filter, rejects_preambles=rejects_preambles)
        self._stops = StopStrings(request.answer.stop) if request.answer.stop else None
        self.recoveries, self._logprobs = recoveries, logprobs
        self._wire_name = tools.wire
        self._final_header = final_header
        # length of the journal before anything is generated
        self.known_length = len(request.resumption.journal or self.transcript.journal.numbers)
        calls = () if self.round is None else tuple(self.round.calls)
        self._state = AnswerState(calls=calls) if calls else INITIAL_STATE  # state at the end of the last step

    @property
    def stop_sequence(self) -> str | None:
        """Return the client's stop string that ended the answer, or None."""
        return None if self._stops is None else self._stops.matched

    @property
    def next_step(self) -> Step:
        """Return the action after the last step."""
        return next_step(self._state) if self.stop_sequence is None else ANSWER_DONE

    @property
    def has_pending_edit(self) -> bool:
        return self.transcript.controller.step.pending is not None and self.stop_sequence is None

    @property
    def is_stopped(self) -> bool:
        """Return whether a pending edit or a stop string ends the current generation."""
        is_matched = self._stops is not None and self._stops.matched is not None
        return is_matched or self.transcript.controller.step.pending is not None

    @property
    def token_count(self) -> int:
        """Return the number of tokens that the model generated in all steps so far."""
        return self.transcript.router.output_tokens

    @property
    def undecided_tokens(self) -> int:
        """Return how many tokens a marker, an edit or the generation's end may have to process."""
        edit = self.transcript.controller.step.pending
        return max(self.transcript.router.undecided_tokens, 0 if edit is None else len(edit.body))

    @property
    def is_step_complete(self) -> bool:
        """Return whether no backend can add anything to the current step."""
        return self.transcript.journal.is_ended or self.transcript.is_broken_off or self.stop_sequence is not None

    @property
    def is_handed_back(self) -> bool:
        """Return whether the answer ends after its calls were run, without another generation."""
        return self._state.has_run and isinstance(self.next_step, AnswerDone)

    @property
    def is_done(self) -> bool:
        """Return whether the answer ends after the current step."""
        return self.stop_sequence is not None or (
            isinstance(self.next_step, AnswerDone) and self.transcript.controller.step.pending is None
        )

    # -- generation

    def start_generation(self, opening: Tokens) -> None:
        """Begin a generation; `opening` are the tokens of the message that its prompt leaves open."""
        self.items.start_generation()
        self.transcript.start_step(opening, is_first=not self.items.context.number)

    def feed(self, tokens: Sequence[int]) -> list[Event]:
        """Read more generated tokens, up to a stop string, and return the events to emit."""
        if self._stops is not None or self._logprobs is not None:
            # The tokens are read one by one, because output after a stop string must not change the result, even if the
            # backend sends it in the same chunk. A chunk may also contain the ends and beginnings of several texts.
            read = (each for each in counted(share_ids(tokens), self._logprobs) if self.stop_sequence is None)
            return [event for token in read for event in self._emit(self.transcript.feed((token,)))]
        events = self.transcript.feed(share_ids(tokens))
        # Nearly always, there is only one delta, which `_record` ignores.
        is_delta = self._filter is None and len(events) == 1 and type(events[0]) is Delta
        return events if is_delta else self._emit(events)

    def apply_edit(self) -> list[Event]:
        """Apply the pending prompt edit and return the events to emit."""
        return self._emit(self.transcript.apply_edit())

    def end_generation(self, reason: FinishReason) -> list[Event]:
        """End the current generation and return the events to emit."""
        # If no prompt edit is pending, the step ends too, and `next_step` then returns the next action.
        events = self._emit(self.transcript.end_generation(reason))
        if self.has_pending_edit:
            return events
        exhausted = self.round is not None and self.round.budget.exhausted
        self._state = self.items.state(reason, cut_call=self.transcript.router.cut_call, exhausted=exhausted)
        if not self._state.calls or self._filter is None or self.round is None:
            return events
        if isinstance(step := self.next_step, RunTools):
            self._end_step()
            self.round.start(step.calls)
            return events
        self._filter.drop_calls()
        if self.stop_sequence is None and reason is FinishReason.STOP:
            events += self._record([Repaired(LATE_CALL, self.transcript.router.generated)])
        return events

    def start_next_step(self) -> list[Event]:
        """Begin the next step, which must be ContinueTurn or OpenFinal, and return its events."""
        step = self.next_step
        assert isinstance(step, ContinueTurn | OpenFinal)
        self._end_step()
        return self._start_step(step)

    def finish(self, reason: FinishReason, added: Usage) -> Finished:
        """Return the last event of the answer.

        The event's usage is the sum of the output tokens and `added`, the usage of prompts and discarded output.
        """
        stop = self.stop_sequence
        if stop is not None:
            reason = FinishReason.STOP
        paused = self.next_step == AnswerDone(paused=True)
        handed = paused or (self._state.needs_client and self.is_handed_back)
        self.transcript.controller.finish(handed=handed, is_stopped=stop is not None)
        is_cut = self.transcript.router.cut_call or self._state.has_cut_tools
        return Finished(reason, added + self.transcript.router.usage, stop, is_cut and stop is None, paused)

    # -- server tools

    def list_tools(self) -> list[Event]:
        """Return the events that list the servers' tools; they are the first events of an answer."""
        assert self.round is not None
        return self._record_note(self.round.tools.note(), self.round.tool_lists())

    def announce_call(self, arguments: ToolArguments, *, late: bool) -> list[Event]:
        """Begin the next call of the round and return its events.

        With `late`, no time is left: the call is announced, but does not run.
        """
        assert self.round is not None
        assert self._filter is not None
        return self._announce(*self.round.call(arguments, self._filter.next_index(), late=late))

    def record_outcome(self, outcome: CallOutcome) -> list[Event]:
        """Record the outcome of the call that was announced last, and return the events to emit."""
        assert self.round is not None
        note, events, added = self.round.record(outcome, self.transcript.router.generated)
        self.items.add_results(added)
        self.transcript.controller.found = [f"{FUNCTIONS}{self._wire_name(name)}" for name in self.round.found]
        return self._record_note(note, events) + self._end_round()

    def _announce(self, note: Note, events: list[Event]) -> list[Event]:
        return self._record_note(note, events) + self._end_round()

    def _record_note(self, note: Note, events: list[Event]) -> list[Event]:
        """Add a note to the journal, and record and return the events that follow from the note."""
        self.transcript.add_entry(JournalEntry(note))
        return self._record(events)

    def _end_round(self) -> list[Event]:
        """If the round is complete, determine and begin the next step; return the events to emit."""
        assert self.round is not None
        if not self.round.is_complete:
            return []
        needs_approval = self.items.end_round()
        if not self.items.context.number:
            # The round consisted of approved calls before the first generation. That generation follows, unless a tool
            # asks the user a question.
            self._state = AnswerState(has_run=True, needs_client=needs_approval)
            return []
        budget = self.round.budget
        self._state = self._state.after_tools(
            needs_approval=needs_approval, exhausted=budget.exhausted, paused=budget.paused
        )
        step = self.next_step
        if isinstance(step, OpenFinal):
            return self._start_step(step)
        if isinstance(step, Generate):
            self.items.start_step(step)
            self.transcript.start_step((), is_first=False)
        return []

    # -- replay of a journal

    def replay_entry(self, entry: JournalEntry) -> list[Event]:
        """Repeat the action that a journal entry records, and return its events.

        Raises StoreUnreadable if the content of the entry is invalid.
        """
        # An entry that does not fit the request is ignored here. `replay` detects it, because it compares the journals.
        try:
            if (events := replay_entry(self.transcript, entry)) is not None:
                return self._emit(events)
            if self.round is None:
                return []
            if LISTED in entry.value:
                return self.list_tools()
            if CALL in entry.value and self._filter is not None:
                return self._announce(*self.round.call_as_recorded(entry.value, self._filter.next_index()))
            return self.record_outcome(self.round.recorded_outcome(entry.value))
        except ValueError as failure:
            raise StoreUnreadable(UNFIT_JOURNAL) from failure

    def _start_step(self, step: ContinueTurn | OpenFinal) -> list[Event]:
        self.items.start_step(step)
        opening = self._final_header() if isinstance(step, OpenFinal) else ()
        self.transcript.start_step(opening, is_first=False)
        return self._record([Repaired(step.rule, self.transcript.router.generated)])

    def _end_step(self) -> None:
        self.transcript.end_step()
        self.items.end_step(self.token_count)

    def _emit(self, events: list[Event]) -> list[Event]:
        if self._filter is not None:
            events = self._filter.filter(events)
        if self._stops is not None:
            events = self._stops.filter(events)
        return self._record(events)

    def _record(self, events: list[Event]) -> list[Event]:
        record_texts(events, None if self.transcript.is_replaying else self._logprobs)
        for event in events:
            if isinstance(event, Closed):
                self.items.closed.append(event)
            elif isinstance(event, Repaired) and event.rule not in self.recoveries:
                self.recoveries.append(event.rule)
        return events


@contextmanager
def detached(reader: OutputReader) -> Iterator[None]:
    """Let the block work on copies of the reader's journal and recoveries.

    The additions are merged into the originals if the block raises no error.
    """
    journal = reader.transcript.journal
    numbers, recoveries = journal.numbers, reader.recoveries
    journal.numbers, reader.recoveries = [*numbers], [*recoveries]
    yield
    numbers += journal.numbers[len(numbers) :]
    recoveries += reader.recoveries[len(recoveries) :]
    journal.numbers, reader.recoveries = numbers, recoveries


def replay(reader: OutputReader, journal: Sequence[int], opening: Tokens) -> list[Event]:
    """Feed the journal of an earlier stream of the same request to the reader.

    Returns all events. The answer then continues after the last token of the journal. `opening` as for
    `start_generation`. Raises StoreUnreadable if the journal does not fit the request.
    """
    events: list[Event] = []
    reader.transcript.is_replaying = True
    reader.start_generation(opening)
    for part in parts_of(journal):
        match part:
            case TokenSource():
                reader.transcript.set_source(part, reader.transcript.controller.enforced_kinds)
            case JournalEntry():
                events += reader.replay_entry(part)
            case JournalMarker.STEP_ENDED:
                events += reader.end_generation(FinishReason.STOP)
                if isinstance(reader.next_step, ContinueTurn | OpenFinal) and reader.stop_sequence is None:
                    events += reader.start_next_step()
            case tokens:
                events += reader.feed(tokens)
    if reader.transcript.journal.numbers != list(journal):
        raise StoreUnreadable(UNFIT_JOURNAL)
    reader.transcript.is_replaying = False
    return events


def transcript_of(
    encoding: Encoding,
    tools: ToolSet,
    request: GenerationRequest,
    hosted: OfferedServerTools | None,
    new_call_id: Callable[[], str],
    violation: Violation | None,
) -> Transcript:
    """Return a new transcript for an answer to `request`."""
    approved: Sequence[str] = ()
    if request.server_tools is not None:
        approved = [call.name for call in decided_calls(request.conversation, request.server_tools)[0]]
    server_tools = None if hosted is None else hosted.every
    not_found_yet = () if hosted is None else [tool.name for tool in hosted.not_found_yet(request.conversation)]
    requirements = requirements_of(request, tools, server_tools, approved, not_found_yet)
    controller = InterventionController(encoding, requirements)
    router = HarmonyRouter(
        encoding,
        tools,
        new_call_id,
        hold_calls=request.answer.hold_calls,
        calls_allowed=request.answer.calls_allowed,
        # With server tools, `ServerToolFilter` limits the calls after the router.
        parallel_calls=request.answer.parallel_calls or hosted is not None,
        gate=MessageGate(controller, violation),
    )
    transcript = Transcript(encoding, router, controller, is_noted=request.resumption.journal_note is not None)
    if request.resumption.journal_note is not None and not request.resumption.journal:
        transcript.add_entry(JournalEntry({NOTED: dict(request.resumption.journal_note)}))
    return transcript
