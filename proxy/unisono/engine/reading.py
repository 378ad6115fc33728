"""An answer as far as it was read: tokens become events, and the journal in which others can read them again.

Tokens of a backend and tokens of a journal go the same way, so that both come to the same events, call ids, counts and
next steps. No I/O; the conversation is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono.core.conversation import Conversation, Tokens
from unisono.core.events import Closed, Event, Finished, Repaired
from unisono.core.generation import CALL, ENDOFTEXT, RETURN, FinishReason
from unisono.engine.journal import FIRST_MARK, Mark, Way, parts_of
from unisono.engine.steps import Answer, Done, OpenFinal, Step, next_step
from unisono.engine.stops import StopStrings
from unisono.engine.turn import STEP_ENDED, Turn
from unisono.errors import StoreUnreadable
from unisono.harmony.encoding import Encoding
from unisono.harmony.header import Header
from unisono.harmony.router import HarmonyRouter
from unisono.harmony.tools import ToolSet

STOPS = frozenset({RETURN, CALL, ENDOFTEXT})
"""What no backend generates anything behind."""


class Reading:
    """One answer, step by step. For each: `begin`, `came`, `feed` as often as it takes, `end`; then `go_on` when
    another follows. `recoveries` collects rule names, each once."""

    def __init__(
        self,
        encoding: Encoding,
        tools: ToolSet,
        turn: Turn,
        new_call_id: Callable[[], str],
        recoveries: list[str],
    ) -> None:
        self._router = HarmonyRouter(
            encoding,
            tools,
            new_call_id,
            hold_calls=turn.hold_calls,
            calls_allowed=turn.calls_allowed,
            parallel_calls=turn.parallel_calls,
        )
        self._stops = StopStrings(turn.stop) if turn.stop else None
        self._recoveries = recoveries
        self._answer = Answer()
        self._way = Way()
        self._begun_at = 0
        self.journal: list[int] = []
        self.closed: list[Closed] = []
        self.step: OpenFinal | None = None
        """What the current step does; None for the first, which answers the conversation as it is."""
        self.spent = 0
        """Tokens of the steps before this one."""
        self.decided: Step = Done()
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
        if opening or self.step is not None:
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
        self._answer = self._answer.after(reason, self.closed, cut_call=self._router.cut_call)
        self.decided = next_step(self._answer)
        return shown

    def go_on(self, step: OpenFinal, opening: Tokens) -> list[Event]:
        """Another step follows, and `opening` is what its prompt leaves open."""
        self.journal.append(STEP_ENDED)
        self._begun_at = len(self.journal)
        self.step, self.spent = step, self.completed
        self.begin(opening)
        return self._shown([Repaired(step.rule, self.spent)])

    def finished(self, reason: FinishReason) -> Finished:
        """The last event; its usage knows nothing of the prompt."""
        if self.stop_sequence is not None:
            reason = FinishReason.STOP
        return self._router.finished(reason, self.stop_sequence)

    def again(
        self, journal: Sequence[int], conversation: Conversation, opening_of: Callable[[Conversation], Tokens]
    ) -> list[Event]:
        """Read what an earlier run left of the same turn, in place of a backend's first tokens; all of its events.
        Raises StoreUnreadable for what cannot be a journal of this turn."""
        events: list[Event] = []
        self.begin(opening_of(conversation))
        for part in parts_of(journal):
            match part:
                case Way():
                    self.came(part)
                case Mark.STEP_ENDED:
                    events += self.end(FinishReason.STOP)
                    if isinstance(self.decided, OpenFinal):
                        events += self.go_on(self.decided, opening_of(self.decided.extend(conversation)))
                case tokens:
                    events += self.feed(tokens)
        if self.journal != list(journal):
            raise StoreUnreadable("What was generated so far does not fit the request it was generated for.")
        return events

    @property
    def ended(self) -> bool:
        """Whether the step's last token is one that no backend generates anything behind."""
        return self._begun_at < len(self.journal) and self.journal[-1] in STOPS

    def _shown(self, events: list[Event]) -> list[Event]:
        if self._stops is not None:
            events = self._stops.filter(events)
            self.stop_sequence = self._stops.matched
        for event in events:
            if isinstance(event, Closed):
                self.closed.append(event)
            elif isinstance(event, Repaired) and event.rule not in self._recoveries:
                self._recoveries.append(event.rule)
        return events
