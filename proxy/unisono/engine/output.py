"""Reader of an answer: converts tokens to events, and writes the journal.

Tokens of a backend and tokens of a journal take the same path. Both therefore lead to the same events, call ids, counts
and next steps. The same holds for results of tools. No I/O; the conversation is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from unisono.core.conversation import Item, Tokens, ToolResult
from unisono.core.events import Closed, Event, Finished, Reasoning, Repaired, ToolCall
from unisono.core.generation import Capabilities, Constraint, FinishReason, Sampling
from unisono.core.ports import Violation
from unisono.core.token_ids import share_ids
from unisono.engine.interventions.requirements import kinds_wanted, wishes_of
from unisono.engine.interventions.stop_strings import StopStrings
from unisono.engine.journal import LISTED, JournalEntry, JournalMarker, TokenSource, parts_of
from unisono.engine.request import GenerationRequest
from unisono.engine.server_tools.calls import CALL, CallOutcome, ToolRound
from unisono.engine.server_tools.filter import ServerToolFilter
from unisono.engine.server_tools.policy import LATE
from unisono.engine.steps import (
    AnswerDone,
    AnswerState,
    Generate,
    OpenFinal,
    RunTools,
    Step,
    StepContext,
    next_step,
    to_said,
)
from unisono.engine.transcript import course_of
from unisono.errors import StoreUnreadable
from unisono.harmony.encoding import Encoding
from unisono.harmony.tools import ToolSet

UNFIT = "What was generated so far does not fit the request it was generated for."


class OutputReader:
    """Reader of one answer, step by step.

    Call order for each step: `begin`, `came`, `feed` (repeatedly), `end`. Then act on `decided`: call `go_on`, or run
    the calls of `round`. `final` returns the tokens that open an answer on `final`. `recoveries` collects rule names,
    each once.
    """

    def __init__(
        self,
        encoding: Encoding,
        tools: ToolSet,
        turn: GenerationRequest,
        new_call_id: Callable[[], str],
        recoveries: list[str],
        *,
        final: Callable[[], Tokens],
        round_: ToolRound | None = None,
        violation: Violation | None = None,
    ) -> None:
        wishes = wishes_of(turn, tools, None if round_ is None else round_.tools)
        self._course = course_of(encoding, tools, turn, wishes, new_call_id, violation)
        self._router, self.plan = self._course.router, self._course.plan
        self._sieve = ServerToolFilter(round_.tools, parallel_calls=turn.parallel_calls) if round_ is not None else None
        self._stops = StopStrings(turn.stop) if turn.stop else None
        self._recoveries = recoveries
        self._final = final
        self._closed_before = 0
        self.opened = False  # the step's prompt ends in the header of the answer
        self._cut = False
        self._answer = AnswerState()
        self._trail: list[Item] = []
        self._prompted = 0
        self.wants = kinds_wanted(wishes)  # constraint kinds that a backend should enforce
        self.round = round_  # calls of server tools that run after the last step
        self.closed: list[Closed] = []
        self.begun = False  # a generation was begun
        self.steps = 0  # steps that ended and were followed by another one
        self.spent = 0  # tokens of those steps
        # action after the last step
        self.decided: Step = RunTools(tuple(round_.calls)) if round_ is not None and round_.calls else Generate()
        self.stop_sequence: str | None = None  # the client's stop string that ended the answer

    @property
    def journal(self) -> list[int]:
        return self._course.journal

    @journal.setter
    def journal(self, journal: list[int]) -> None:
        self._course.journal = journal

    @property
    def said(self) -> list[int]:
        return self._course.said

    @property
    def put(self) -> int:
        return self._course.put

    @property
    def moves(self) -> bool:
        """Return whether a prompt edit is pending."""
        return self.plan.move is not None and self.stop_sequence is None

    @property
    def broken_off(self) -> bool:
        """Return whether the answer was ended because the model repeats itself."""
        return self._course.broken_off

    @property
    def constraint(self) -> Constraint | None:
        return self._course.constraint

    def sampling(self, wanted: Sampling) -> Sampling:
        """Return the sampling of the next generation, where the client wants `wanted`."""
        return self.plan.current.attempts.sampling(wanted, constrained=self.constraint is not None)

    @property
    def completed(self) -> int:
        """Return the number of tokens of all steps so far."""
        return self._router.usage.completion_tokens

    @property
    def guessed(self) -> bool:
        """Return whether any token was made from text."""
        return self._router.canonical

    @property
    def unsettled(self) -> int:
        """Return the number of tokens that the next marker, end or edit may parse, check and encode."""
        move = self.plan.move
        return max(self._router.unsettled, 0 if move is None else len(move.body))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Work on copies of the journal and recoveries; merge them if the block raises no error."""
        journal, recoveries = self.journal, self._recoveries
        self.journal, self._recoveries = [*journal], [*recoveries]
        yield
        journal += self.journal[len(journal) :]
        recoveries += self._recoveries[len(recoveries) :]
        self.journal, self._recoveries = journal, recoveries

    # -- continuation after a failed backend

    def take_up(self, able: frozenset[str]) -> None:
        """Continue on another backend, which enforces the constraint kinds `able`."""
        self._course.take_up(able)

    @property
    def droppable(self) -> bool:
        return self._course.droppable

    def drop(self) -> None:
        self._course.drop()

    def unread(self) -> bool:
        return self._course.unread()

    def begin(self, opening: Tokens) -> None:
        """Begin the step's generation after `opening`, the tokens of the message it leaves open."""
        self.begun = True
        self._prompted = len(self._trail)
        self._course.begin(opening, first=not self.steps)

    def came(self, capabilities: Capabilities, able: frozenset[str]) -> None:
        """Set the source of the next tokens, and the constraint kinds that the backend enforces."""
        self._course.came(TokenSource.of(capabilities), able)

    def feed(self, tokens: Sequence[int]) -> list[Event]:
        """Return the events to emit for more tokens."""
        return self._shown(self._course.feed(share_ids(tokens)))

    def turn(self) -> list[Event]:
        """Make the pending prompt edit and return the events to emit."""
        return self._shown(self._course.turn())

    def end(self, reason: FinishReason) -> list[Event]:
        """Return the events to emit at a generation's end."""
        # Unless a prompt edit is pending, the step ends too, and `decided` holds the next action.
        shown = self._shown(self._course.end(reason))
        if self.moves:
            return shown
        self._answer = self._answer_of(reason)
        self.decided = AnswerDone() if self.stop_sequence is not None else next_step(self._answer)
        if not self._answer.calls or self._sieve is None or self.round is None:
            return shown
        if isinstance(self.decided, RunTools):
            self._end_step()
            self.round.begin(self.decided.calls)
            return shown
        self._sieve.drop_calls()
        if self.stop_sequence is not None:
            return shown
        if reason is FinishReason.STOP:
            return shown + self._noted([Repaired(LATE, self.completed)])
        self._cut = True
        return shown

    def go_on(self, step: OpenFinal) -> list[Event]:
        """Begin another step, in the message that is opened for it."""
        self._end_step()
        return self._open(step)

    def finished(self, reason: FinishReason) -> Finished:
        """Return the last event; its usage does not include the prompt."""
        if self.stop_sequence is not None:
            reason = FinishReason.STOP
        paused = isinstance(self.decided, AnswerDone) and self.decided.paused
        self.plan.finish(handed=paused or (self.handed_back and self._answer.handed))
        finished = self._router.finished(reason, self.stop_sequence)
        return replace(finished, cut_call=finished.cut_call or self._cut, paused=paused)

    @property
    def complete(self) -> bool:
        """Return whether no backend can add anything to the current step."""
        return self.ended or self.broken_off or self.stop_sequence is not None

    @property
    def ended(self) -> bool:
        return self._course.ended

    @property
    def context(self) -> StepContext:
        """Return what the steps before the current one add to the conversation."""
        results = (item for item in self._trail[: self._prompted] if isinstance(item, ToolResult))
        return StepContext(self.steps, self.opened, tuple(self._trail), tuple(results))

    @property
    def context_of_final(self) -> StepContext:
        """Return the context of the next step, if it opens an answer."""
        return StepContext(self.steps + 1, is_final_open=True, items=(*self._trail, *self._said_in_step()))

    # -- server tools

    def list_tools(self) -> list[Event]:
        """List the tools of the servers for the client, before anything else."""
        assert self.round is not None
        self._note(self.round.tools.note())
        return self._noted(self.round.listed())

    def call(self, *, late: bool) -> list[Event]:
        """Begin the next call of the round. `late`: the time for tools has passed."""
        assert self.round is not None
        return self._called(*self.round.call(self._next_index(), late=late))

    def ran(self, told: CallOutcome) -> list[Event]:
        """Report the outcome of the call that was emitted last."""
        assert self.round is not None
        note, events, result = self.round.ran(told, self.completed)
        self._note(note)
        if result is not None:
            self._trail.append(result)
        return self._noted(events) + self._settled()

    @property
    def results_by_call(self) -> dict[str, ToolResult]:
        return {item.call_id: item for item in self._trail if isinstance(item, ToolResult)}

    @property
    def over(self) -> bool:
        return isinstance(self.decided, AnswerDone) or self.stop_sequence is not None

    @property
    def handed_back(self) -> bool:
        return self._answer.ran and isinstance(self.decided, AnswerDone)

    def _called(self, note: JournalEntry, events: list[Event]) -> list[Event]:
        self._note(note)
        return self._noted(events) + self._settled()

    def _next_index(self) -> int:
        assert self._sieve is not None
        index = self._sieve.items
        self._sieve.items += 1
        return index

    def _settled(self) -> list[Event]:
        """Decide on the next step and begin it, if the round is over."""
        assert self.round is not None
        if not self.round.over:
            return []
        # The calls of the round are not part of the next step's items.
        self._closed_before = len(self.closed)
        if not self.steps:
            # These were approved calls; the first generation follows them.
            self.decided = Generate()
            return []
        handed = self._answer.handed or self.round.asked
        ledger = self.round.ledger
        self._answer = replace(self._answer, ran=True, handed=handed, exhausted=ledger.exhausted, paused=ledger.paused)
        self.decided = next_step(self._answer)
        match self.decided:
            case Generate():
                self.opened = False
                self.begin(())
            case OpenFinal():
                return self._open(self.decided)
            case _:
                pass
        return []

    # -- replay of a journal

    def read_again(self, journal: Sequence[int], opening: Tokens) -> list[Event]:
        """Replay the journal of an earlier stream of the same request; return all of its events.

        It replaces a backend's first tokens. `opening` as for `begin`. Raises StoreUnreadable for a journal that does
        not fit the request.
        """
        events: list[Event] = []
        self.begin(opening)
        for part in parts_of(journal):
            match part:
                case TokenSource():
                    self._course.came(part, self.plan.able)
                case JournalEntry():
                    events += self._note_again(part)
                case JournalMarker.STEP_ENDED:
                    events += self.end(FinishReason.STOP)
                    if isinstance(self.decided, OpenFinal):
                        events += self.go_on(self.decided)
                case tokens:
                    events += self.feed(tokens)
        if self.journal != list(journal):
            raise StoreUnreadable(UNFIT)
        return events

    def _note_again(self, note: JournalEntry) -> list[Event]:
        # An entry that does not fit is ignored here; the comparison at the end finds it.
        try:
            if (events := self._course.again(note)) is not None:
                return self._shown(events)
            if self.round is None:
                return []
            if LISTED in note.value:
                return self.list_tools()
            if CALL in note.value:
                return self._called(*self.round.call_again(note.value, self._next_index()))
            return self.ran(self.round.told_again(note.value))
        except ValueError as failure:
            raise StoreUnreadable(UNFIT) from failure

    # -- internals

    def _open(self, step: OpenFinal) -> list[Event]:
        self.opened = True
        self.begin(self._final())
        return self._noted([Repaired(step.rule, self.spent)])

    def _end_step(self) -> None:
        self._trail += self._said_in_step()
        self._course.end_step()
        self._closed_before = len(self.closed)
        self.steps += 1
        self.spent = self.completed
        if self._sieve is not None:
            self._sieve.begin()

    def _said_in_step(self) -> list[Item]:
        if self._sieve is not None:
            return self._sieve.said
        return [said for closed in self.closed[self._closed_before :] if (said := to_said(closed)) is not None]

    def _answer_of(self, reason: FinishReason) -> AnswerState:
        """Return the state of the answer at the end of a step."""
        closed = self.closed[self._closed_before :]
        sieve = self._sieve
        return AnswerState(
            reason,
            shown=any(not isinstance(each.item, Reasoning) for each in closed),
            answered=sieve is not None and sieve.answered,
            cut_call=self._router.cut_call,
            opened=self.opened,
            calls=() if sieve is None else tuple(sieve.held),
            handed=any(isinstance(each.item, ToolCall) and each.complete for each in closed),
            exhausted=self.round is not None and self.round.ledger.exhausted,
        )

    def _note(self, note: JournalEntry) -> None:
        self._course.note(note)

    def _shown(self, events: list[Event]) -> list[Event]:
        if self._sieve is not None:
            events = self._sieve.sift(events)
        if self._stops is not None:
            events = self._stops.filter(events)
            self.stop_sequence = self._stops.matched
        return self._noted(events)

    def _noted(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, Closed):
                self.closed.append(event)
            elif isinstance(event, Repaired) and event.rule not in self._recoveries:
                self._recoveries.append(event.rule)
        return events
