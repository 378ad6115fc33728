"""An answer as far as it was read: tokens become events, and the journal in which others can read them again.

Tokens of a backend and tokens of a journal go the same way, so that both come to the same events, call ids, counts and
next steps; so do the outcomes of tools. No I/O; the conversation is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from unisono.core import generation
from unisono.core.conversation import Conversation, Item, Tokens, ToolResult
from unisono.core.events import Closed, Event, Finished, Reasoning, Repaired, ToolCall
from unisono.core.generation import ENDOFTEXT, RETURN, FinishReason
from unisono.engine.hosted import LISTED
from unisono.engine.journal import FIRST_MARK, Mark, Note, Way, parts_of
from unisono.engine.judging import LATE
from unisono.engine.round import CALL, Round, Told
from unisono.engine.sieve import Sieve
from unisono.engine.steps import Answer, Done, Generate, OpenFinal, RunTools, Step, next_step, to_said
from unisono.engine.stops import StopStrings
from unisono.engine.turn import STEP_ENDED, Turn
from unisono.errors import StoreUnreadable
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import Header
from unisono.harmony.router import HarmonyRouter
from unisono.harmony.tools import ToolSet

STOPS = frozenset({RETURN, generation.CALL, ENDOFTEXT})
"""What no backend generates anything behind."""

UNFIT = "What was generated so far does not fit the request it was generated for."


class Reading:
    """One answer, step by step. For each: `begin`, `came`, `feed` as often as it takes, `end`; then what `decided`
    says: `go_on`, or the calls of `round`. `final` gives the tokens that open an answer on `final`; `recoveries`
    collects names of rules, each once."""

    def __init__(
        self,
        encoding: Encoding,
        tools: ToolSet,
        turn: Turn,
        new_call_id: Callable[[], str],
        recoveries: list[str],
        *,
        final: Callable[[], Tokens],
        round_: Round | None = None,
    ) -> None:
        self._router = HarmonyRouter(
            encoding,
            tools,
            new_call_id,
            hold_calls=turn.hold_calls,
            calls_allowed=turn.calls_allowed,
            parallel_calls=turn.parallel_calls or round_ is not None,
        )
        self._sieve = Sieve(round_.tools, parallel_calls=turn.parallel_calls) if round_ is not None else None
        self._stops = StopStrings(turn.stop) if turn.stop else None
        self._recoveries = recoveries
        self._final = final
        self._way = Way()
        self._begun_at = 0
        self._closed_before = 0
        self._opened = False
        self._cut = False
        self._answer = Answer()
        self._trail: list[Item] = []
        self._prompted = 0
        self.round = round_
        """The calls of hosted tools that are to be run behind the step that ended last."""
        self.journal: list[int] = []
        self.closed: list[Closed] = []
        self.begun = False
        """Whether anything was to be generated yet."""
        self.steps = 0
        """How many ended that another followed."""
        self.spent = 0
        """Tokens of the steps before this one."""
        self.decided: Step = RunTools(tuple(round_.calls)) if round_ is not None and round_.calls else Generate()
        """What follows the step that ended last."""
        self.stop_sequence: str | None = None
        """The client's stop string, once it was met: then the answer is over."""

    @property
    def said(self) -> list[int]:
        """The tokens of the current step."""
        return [number for number in self.journal[self._begun_at :] if number < FIRST_MARK]

    @property
    def completed(self) -> int:
        """Tokens of all steps so far."""
        return self._router.usage.completion_tokens

    @property
    def guessed(self) -> bool:
        """Whether any token was made from text."""
        return self._router.canonical

    def begin(self, opening: Tokens) -> None:
        """The current step's generation begins. `opening` are the tokens of the message that its prompt leaves open."""
        self.begun = True
        self._prompted = len(self._trail)
        if opening or self.steps:
            self._router.resume(Header(verbatim=True) if opening else None, opening)

    def came(self, way: Way) -> None:
        """How the tokens come from here on."""
        if way != self._way:
            self._way = way
            self.journal.append(way.mark)
            # What was guessed once is part of a message whose other tokens may be the model's own.
            self._router.canonical = self._router.canonical or way.guessed

    def feed(self, tokens: Sequence[int]) -> list[Event]:
        """What may be shown of some more tokens."""
        self.journal += tokens
        return self._shown(self._router.feed(tokens))

    def end(self, reason: FinishReason) -> list[Event]:
        """What may be shown of the step's end; `decided` then says what follows."""
        shown = self._shown(self._router.end(reason, stop_hidden=self._way.stop_hidden))
        self._answer = self._answer_of(reason)
        self.decided = Done() if self.stop_sequence is not None else next_step(self._answer)
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
        """Another step follows, in the message that is opened for it."""
        self._end_step()
        return self._open(step)

    def finished(self, reason: FinishReason) -> Finished:
        """The last event; its usage knows nothing of the prompt."""
        if self.stop_sequence is not None:
            reason = FinishReason.STOP
        finished = self._router.finished(reason, self.stop_sequence)
        return replace(finished, cut_call=True) if self._cut else finished

    @property
    def ended(self) -> bool:
        """Whether the step's last token is one that no backend generates anything behind."""
        return self._begun_at < len(self.journal) and self.journal[-1] in STOPS

    def extended(self, conversation: Conversation) -> Conversation:
        """The conversation that the current step answers."""
        if not self.steps:
            return conversation
        prefill = "" if self._opened else None
        return replace(conversation, items=(*conversation.items, *self._trail), prefill=prefill)

    def with_final_opened(self, conversation: Conversation) -> Conversation:
        """The conversation that would be answered next when the step that ended is followed by an opened answer."""
        items = (*conversation.items, *self._trail, *self._said_in_step())
        return replace(conversation, items=items, prefill="")

    # -- tools the gateway runs itself

    def list_tools(self) -> list[Event]:
        """What the turn's servers offer, as far as it is to be told; before anything else."""
        assert self.round is not None
        self._note(self.round.tools.note())
        return self._noted(self.round.listed())

    def call(self, *, late: bool) -> list[Event]:
        """The next call of the round. `late`: the time for tools is over."""
        assert self.round is not None
        return self._called(*self.round.call(self._next_index(), late=late))

    def ran(self, told: Told) -> list[Event]:
        """What came of the call that was shown last."""
        assert self.round is not None
        note, events, result = self.round.ran(told, self.completed)
        self._note(note)
        if result is not None:
            self._trail.append(result)
        return self._noted(events) + self._settled()

    @property
    def results(self) -> list[ToolResult]:
        """Results of hosted tools that the current step's prompt holds behind the first one's."""
        return [item for item in self._trail[: self._prompted] if isinstance(item, ToolResult)]

    @property
    def results_by_call(self) -> dict[str, ToolResult]:
        """Results of all hosted calls that the model made in this answer."""
        return {item.call_id: item for item in self._trail if isinstance(item, ToolResult)}

    @property
    def over(self) -> bool:
        """Whether nothing follows what was read."""
        return isinstance(self.decided, Done) or self.stop_sequence is not None

    @property
    def handed_back(self) -> bool:
        """Whether tools were run and nothing is to be generated behind them."""
        return self._answer.ran and isinstance(self.decided, Done)

    def _called(self, note: Note, events: list[Event]) -> list[Event]:
        self._note(note)
        return self._noted(events) + self._settled()

    def _next_index(self) -> int:
        assert self._sieve is not None
        index = self._sieve.items
        self._sieve.items += 1
        return index

    def _settled(self) -> list[Event]:
        """When the round is over, what follows is decided and begun."""
        assert self.round is not None
        if not self.round.over:
            return []
        # The calls of the round are nothing that the next step shows.
        self._closed_before = len(self.closed)
        if not self.steps:
            # Calls that were approved: only now anything is generated.
            self.decided = Generate()
            return []
        handed = self._answer.handed or self.round.asked
        self._answer = replace(self._answer, ran=True, handed=handed, exhausted=self.round.ledger.exhausted)
        self.decided = next_step(self._answer)
        match self.decided:
            case Generate():
                self._opened = False
                self.begin(())
            case OpenFinal():
                return self._open(self.decided)
            case _:
                pass
        return []

    # -- a journal of before

    def again(self, journal: Sequence[int], opening: Tokens) -> list[Event]:
        """Read what an earlier run left of the same turn, in place of a backend's first tokens; all of its events.
        `opening` as for `begin`. Raises StoreUnreadable for what cannot be a journal of this turn."""
        events: list[Event] = []
        self.begin(opening)
        for part in parts_of(journal):
            match part:
                case Way():
                    self.came(part)
                case Note():
                    events += self._note_again(part)
                case Mark.STEP_ENDED:
                    events += self.end(FinishReason.STOP)
                    if isinstance(self.decided, OpenFinal):
                        events += self.go_on(self.decided)
                case tokens:
                    events += self.feed(tokens)
        if self.journal != list(journal):
            raise StoreUnreadable(UNFIT)
        return events

    def _note_again(self, note: Note) -> list[Event]:
        """A note that is none of this turn leaves no trace, which is found out at the end."""
        if self.round is None:
            return []
        try:
            if LISTED in note.value:
                return self.list_tools()
            if CALL in note.value:
                return self._called(*self.round.call_again(note.value, self._next_index()))
            return self.ran(self.round.told_again(note.value))
        except ValueError as failure:
            raise StoreUnreadable(UNFIT) from failure

    # -- inside

    def _open(self, step: OpenFinal) -> list[Event]:
        self._opened = True
        self.begin(self._final())
        return self._noted([Repaired(step.rule, self.spent)])

    def _end_step(self) -> None:
        self._trail += self._said_in_step()
        self.journal.append(STEP_ENDED)
        self._begun_at = len(self.journal)
        self._closed_before = len(self.closed)
        self.steps += 1
        self.spent = self.completed
        if self._sieve is not None:
            self._sieve.begin()

    def _said_in_step(self) -> list[Item]:
        if self._sieve is not None:
            return self._sieve.said
        return [said for closed in self.closed[self._closed_before :] if (said := to_said(closed)) is not None]

    def _answer_of(self, reason: FinishReason) -> Answer:
        """What is known when a step ends."""
        closed = self.closed[self._closed_before :]
        sieve = self._sieve
        return Answer(
            reason,
            shown=any(not isinstance(each.item, Reasoning) for each in closed),
            answered=sieve is not None and sieve.answered,
            cut_call=self._router.cut_call,
            opened=self._opened,
            calls=() if sieve is None else tuple(sieve.held),
            handed=any(isinstance(each.item, ToolCall) and each.complete for each in closed),
            exhausted=self.round is not None and self.round.ledger.exhausted,
        )

    def _note(self, note: Note) -> None:
        self.journal += note.numbers()
        self._begun_at = len(self.journal)

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
