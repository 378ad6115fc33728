"""Round of server tool calls: each call is emitted, decided and noted before it runs.

Its outcome is noted after it. The note of a call includes the decision, so that a replay knows whether the call may
have been made. No I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.core.conversation import Conversation, Json, ToolResult
from unisono.core.events import Closed, Delta, Event, HostedCall, Listed, Listing, Opened, Ran, Repaired
from unisono.core.tool_arguments import ToolArguments, read_arguments
from unisono.core.tools import ToolOutcome
from unisono.engine.journal import JournalEntry
from unisono.engine.server_tools.policy import ASK, MOST_CALLS, NO_TIME_LEFT, TOLD, CallBudget
from unisono.engine.server_tools.tools import OfferedServerTools, ServerToolCall, decided_calls

CALL, OF, VERDICT = "call", "of", "verdict"
RAN, TEXT, ERROR, STRUCTURED, UNKNOWN, SAID, RULE = "ran", "text", "error", "structured", "unknown", "said", "rule"


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that was emitted and has no outcome yet."""

    item: HostedCall
    call: ServerToolCall
    arguments: ToolArguments
    verdict: str


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The outcome of a call, the text for the model, and the rule that replaced the text."""

    outcome: ToolOutcome
    said: str
    rule: str = ""

    @classmethod
    def instead(cls, said: str, rule: str) -> CallOutcome:
        """Return the outcome of a call that was not made."""
        return cls(ToolOutcome(said, is_error=True), said, rule)


class ToolRound:
    """Server tools of a request, and the calls of one step; at first the approved calls."""

    def __init__(self, tools: OfferedServerTools, conversation: Conversation) -> None:
        limit = tools.hosting.max_calls
        calls, denied = decided_calls(conversation, tools.hosting)
        self.tools = tools
        self.ledger = CallBudget(tools, MOST_CALLS if limit is None else limit)
        self.calls = deque(calls)  # calls to be made
        self.calling: PendingCall | None = None
        self._arguments: ToolArguments | None = None
        self.asked = False  # an approval was requested for a call of this round
        self.decided: list[ToolResult] = denied  # results of calls that are in the conversation already

    @property
    def over(self) -> bool:
        return not self.calls and self.calling is None

    def begin(self, calls: Sequence[ServerToolCall]) -> None:
        self.calls.extend(calls)
        self.asked = False
        self.ledger.begin()

    def listed(self) -> list[Event]:
        """Return the tool lists that the client does not know yet."""
        events: list[Event] = []
        new = [offer for offer in self.tools.offers if offer.server not in self.tools.hosting.announced]
        for index, offer in enumerate(new):
            listing = Listing(index, offer.server)
            events += (Opened(listing), Listed(listing, offer.tools, offer.error))
        return events

    def read_next(self) -> None:
        """Parse the arguments of the next call before `call` is run."""
        call = self.calls[0]
        self._arguments = read_arguments(call.name, call.arguments)

    def call(self, index: int, *, late: bool) -> tuple[JournalEntry, list[Event]]:
        """Begin the next call, as item number `index`."""
        call, arguments = self._next()
        return self._call(call, arguments, index, self.ledger.judge(call, arguments, late=late))

    def call_again(self, note: Mapping[str, Json], index: int) -> tuple[JournalEntry, list[Event]]:
        """Begin the next call as it was noted.

        Raises ValueError if the note belongs to another call.
        """
        if not self.calls:
            raise ValueError("a note of another call")
        call, arguments = self._next()
        if note.get(OF) != arguments.digest:
            raise ValueError("a note of another call")
        return self._call(call, arguments, index, str(note.get(VERDICT)))

    def _next(self) -> tuple[ServerToolCall, ToolArguments]:
        if self._arguments is None:
            self.read_next()
        assert self._arguments is not None
        arguments, self._arguments = self._arguments, None
        return self.calls.popleft(), arguments

    def _call(
        self, call: ServerToolCall, arguments: ToolArguments, index: int, verdict: str
    ) -> tuple[JournalEntry, list[Event]]:
        server, tool = self.tools.place(call)
        item = HostedCall(index, call.call_id, call.name, server, tool, verdict == ASK, call.approval, arguments)
        self.ledger.enter(arguments, verdict)
        if verdict == ASK:
            self.asked = True
        else:
            self.calling = PendingCall(item, call, arguments, verdict)
        deltas = [Delta(item, call.arguments)] if call.arguments else []
        note = JournalEntry({CALL: call.call_id, OF: arguments.digest, VERDICT: verdict})
        return note, [Opened(item), *deltas, Closed(item, call.arguments, call.tokens)]

    def told(self, calling: PendingCall) -> CallOutcome | None:
        """Return the text for the model instead of a result; None for a call that has to be made."""
        says = TOLD.get(calling.verdict)
        if says is None:
            return None
        return CallOutcome.instead(says(calling.call, calling.arguments, self.tools), calling.verdict)

    def ran(self, told: CallOutcome, position: int) -> tuple[JournalEntry, list[Event], ToolResult | None]:
        """Record the outcome of the current call.

        The result is returned if it follows this answer's own items. `position` as in `Repaired`.
        """
        calling = self.calling
        assert calling is not None
        self.calling = None
        call, outcome = calling.call, told.outcome
        if told.rule == NO_TIME_LEFT:
            self.ledger.time_is_over()
        note: dict[str, Json] = {RAN: call.call_id, TEXT: outcome.text}
        note |= {ERROR: True} if outcome.is_error else {}
        note |= {STRUCTURED: outcome.structured} if outcome.structured is not None else {}
        note |= {UNKNOWN: True} if outcome.outcome_unknown else {}
        note |= {SAID: told.said} if told.said != outcome.text else {}
        note |= {RULE: told.rule} if told.rule else {}
        events: list[Event] = [Ran(calling.item, outcome, told.said, told.rule)]
        if told.rule:
            events.append(Repaired(told.rule, position))
        result = ToolResult(call.call_id, call.name, told.said)
        if not call.approval:
            return JournalEntry(note), events, result
        self.decided.append(result)
        return JournalEntry(note), events, None

    def told_again(self, note: Mapping[str, Json]) -> CallOutcome:
        """Return the noted outcome of the current call.

        Raises ValueError if the note belongs to another call.
        """
        if self.calling is None or note.get(RAN) != self.calling.call.call_id:
            raise ValueError("a note of another call")
        text = str(note.get(TEXT, ""))
        outcome = ToolOutcome(text, ERROR in note, note.get(STRUCTURED), UNKNOWN in note)
        return CallOutcome(outcome, str(note.get(SAID, text)), str(note.get(RULE, "")))
