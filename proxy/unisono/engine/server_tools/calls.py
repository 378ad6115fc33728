"""Round of server tool calls.

Before a call runs, the round decides on it, emits it, and writes the call and the decision to the journal. After the
run, the round writes the outcome to the journal. A replay can therefore distinguish a refused call from a call that may
have run. This module does no I/O; `loop.py` runs the calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Final, TypeAlias

from unisono.core.conversation import Conversation, Item, Json, ToolResult
from unisono.core.events import Closed, Delta, Event, HostedCall, Listed, Listing, Opened, Ran, Repaired
from unisono.core.frozen import dataclass
from unisono.core.server_tool_arguments import ToolArguments, read_arguments
from unisono.core.tool_host import SEARCH_LABEL, ServerToolCall, ToolOutcome, ToolQuestion, found_names
from unisono.engine.server_tools.call_verdicts import (
    ASK,
    MAX_CALLS,
    NO_TIME_LEFT,
    NOT_REPEATED,
    OUTCOME_UNKNOWN,
    REFUSALS,
    CallBudget,
    RefusedCall,
)
from unisono.engine.server_tools.tools import OfferedServerTools, decided_calls, found_tools, with_results

# A note for the journal: a fact about a call as a JSON object.
Note: TypeAlias = Mapping[str, Json]

CALL, OF, VERDICT = "call", "of", "verdict"
RAN, TEXT, ERROR, STRUCTURED, UNKNOWN, SAID, RULE = "ran", "text", "error", "structured", "unknown", "said", "rule"
ASKED = "asked"
ID_DIGITS: Final = 32


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that was emitted and has no outcome yet; `verdict` is the decision on the call."""

    item: HostedCall
    call: ServerToolCall
    arguments: ToolArguments
    verdict: str


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The outcome of a call, and the text of the result for the model.

    `rule` is the name of the recovery that is reported for this outcome; empty if none is reported.
    """

    outcome: ToolOutcome
    text: str
    rule: str = ""

    @classmethod
    def of(cls, outcome: ToolOutcome, *, is_late: bool) -> CallOutcome:
        """Return the outcome of a call that ran; `is_late`: the time for tools has passed."""
        unknown = NOT_REPEATED if outcome.outcome_unknown else ""
        return cls(outcome, outcome.text, NO_TIME_LEFT if is_late else unknown)

    @classmethod
    def refused(cls, text: str, rule: str) -> CallOutcome:
        """Return the outcome of a call that was refused and did not run."""
        return cls(ToolOutcome(text, is_error=True), text, rule)

    @classmethod
    def unknown(cls) -> CallOutcome:
        """Return the outcome of a call that may have run before and is not repeated."""
        return cls(ToolOutcome(OUTCOME_UNKNOWN, is_error=True, outcome_unknown=True), OUTCOME_UNKNOWN, NOT_REPEATED)


class ToolRound:
    """Calls to server tools in one step, and the server tools of the request.

    Before the first step, the calls are those that the client approved.
    """

    def __init__(self, tools: OfferedServerTools, conversation: Conversation) -> None:
        limit = tools.server_tools.max_calls
        calls, denied = decided_calls(conversation, tools.server_tools)
        self.tools = tools
        self.budget = CallBudget(MAX_CALLS if limit is None else limit, tools.server_tools.pause_after)
        self.calls = deque(calls)  # calls that were not begun yet
        self.pending: PendingCall | None = None
        self._conversation = conversation
        self.found: list[str] = []  # names of the tools that searches found during the answer
        self._decided: list[ToolResult] = denied  # results of calls that the conversation of the request contains

    @property
    def is_complete(self) -> bool:
        return not self.calls and self.pending is None

    def start(self, calls: Sequence[ServerToolCall]) -> None:
        self.calls.extend(calls)
        self.budget.start_round()

    def tool_lists(self) -> list[Event]:
        """Return the events that list the tools of servers that are not `announced` yet."""
        events: list[Event] = []
        new = [offer for offer in self.tools.offers if offer.server not in self.tools.server_tools.announced]
        for index, offer in enumerate(new):
            listing = Listing(index, offer.server)
            events += (Opened(listing), Listed(listing, offer.tools, offer.error))
        return events

    def with_results(self, conversation: Conversation) -> Conversation:
        """Return the conversation with the results of approved and denied calls."""
        return with_results(conversation, self._decided)

    def parse_next(self) -> ToolArguments:
        """Return the parsed arguments of the next call."""
        call = self.calls[0]
        return read_arguments(call.name, call.arguments)

    def call(self, arguments: ToolArguments, index: int, *, late: bool) -> tuple[Note, list[Event]]:
        """Begin the next call, as item number `index`; return its journal note and its events.

        `late`: the time for tools has passed.
        """
        call = self.calls[0]
        if call.question is not None:
            return self._call(arguments, index, ASK)
        tool = self.tools.tool(call.name)
        needs_approval = tool is not None and self.tools.server(tool).approval.needed(tool)
        verdict = self.budget.judge(
            call, arguments, is_known=tool is not None, needs_approval=needs_approval, late=late
        )
        return self._call(arguments, index, verdict)

    def call_as_recorded(self, note: Note, index: int) -> tuple[Note, list[Event]]:
        """Begin the next call with the decision in its journal entry `note`.

        Raises ValueError if `note` belongs to a different call.
        """
        if not self.calls or note.get(OF) != (arguments := self.parse_next()).digest:
            raise ValueError("the note belongs to a different call")
        return self._call(arguments, index, str(note.get(VERDICT)))

    def _call(self, arguments: ToolArguments, index: int, verdict: str) -> tuple[Note, list[Event]]:
        call = self.calls.popleft()
        server, tool = self.tools.place(call)
        needs_client = verdict == ASK
        item = HostedCall(
            index, call.call_id, call.name, server, tool, needs_client, call.approval, arguments, call.question
        )
        # If the tool asked the user a question, the gateway repeats the call. Only calls of the model are counted.
        if call.question is None:
            self.budget.record(arguments, verdict)
        # A call that needs an approval has no outcome in this answer. It runs in the next request.
        if not needs_client:
            self.pending = PendingCall(item, call, arguments, verdict)
        deltas = [Delta(item, call.arguments)] if call.arguments else []
        note: Note = {CALL: call.call_id, OF: arguments.digest, VERDICT: verdict}
        return note, [Opened(item), *deltas, Closed(item, call.arguments, call.tokens)]

    def refusal(self, pending: PendingCall) -> CallOutcome | None:
        """Return the outcome of a refused call, with its error reply; None if the call has to run."""
        text_of = REFUSALS.get(pending.verdict)
        if text_of is None:
            return None
        refused = RefusedCall(
            pending.call.name,
            pending.arguments.problem,
            self._names_near(pending.call),
            can_repeat=self.budget.rounds_left is not None,
        )
        return CallOutcome.refused(text_of(refused), pending.verdict)

    def _names_near(self, call: ServerToolCall) -> list[str]:
        conversation = self._conversation
        hidden = {tool.name for tool in conversation.deferred}.difference(self.found)
        client = [tool.name for tool in conversation.tools if tool.name not in conversation.removed]
        return self.tools.names_near(call, hidden, client)

    def record(self, result: CallOutcome, position: int) -> tuple[Note, list[Event], tuple[Item, ...]]:
        """Record the outcome of the current call.

        Returns the journal note, the events, and new items, which follow the call in the conversation: the result, and
        tools that a search found. `position` is as in `Repaired`.
        """
        pending = self.pending
        assert pending is not None
        self.pending = None
        call, outcome = pending.call, result.outcome
        if result.rule == NO_TIME_LEFT:
            self.budget.record_timeout()
        note: dict[str, Json] = {RAN: call.call_id, TEXT: outcome.text}
        # Default values are left out to keep the stored journal small.
        note |= {ERROR: True} if outcome.is_error else {}
        note |= {STRUCTURED: outcome.structured} if outcome.structured is not None else {}
        note |= {UNKNOWN: True} if outcome.outcome_unknown else {}
        note |= {SAID: result.text} if result.text != outcome.text else {}
        note |= {RULE: result.rule} if result.rule else {}
        if outcome.question is not None:
            note[ASKED] = _written(outcome.question)
            self.calls.appendleft(_repeated(call, outcome.question))
        events: list[Event] = [Ran(pending.item, outcome, result.text, result.rule)]
        if result.rule:
            events.append(Repaired(result.rule, position))
        item = ToolResult(call.call_id, call.name, result.text)
        # An approved call is part of the conversation, so its result belongs there and not to the new items.
        if not call.approval:
            # Only the search itself declares tools. A tool server may return a structured outcome that looks the same.
            names = found_names(outcome) if pending.item.server == SEARCH_LABEL else []
            self.found += names
            found = found_tools(self._conversation, names)
            return note, events, (item,) if found is None else (item, found)
        self._decided.append(item)
        return note, events, ()

    def recorded_outcome(self, note: Note) -> CallOutcome:
        """Return the outcome of the current call from its journal entry `note`.

        Raises ValueError if `note` belongs to a different call.
        """
        if self.pending is None or note.get(RAN) != self.pending.call.call_id:
            raise ValueError("the note belongs to a different call")
        text = str(note.get(TEXT, ""))
        outcome = ToolOutcome(text, ERROR in note, note.get(STRUCTURED), UNKNOWN in note, _question(note.get(ASKED)))
        return CallOutcome(outcome, str(note.get(SAID, text)), str(note.get(RULE, "")))


def _repeated(call: ServerToolCall, question: ToolQuestion) -> ServerToolCall:
    """Return the call that repeats `call` after the user has answered the tool's question."""
    tokens = call.tokens or call.earlier_tokens
    # The id is derived from the first call's id, so a process that replays the journal gets the same id.
    call_id = f"call_{sha256(call.call_id.encode()).hexdigest()[:ID_DIGITS]}"
    return ServerToolCall(call_id, call.name, call.arguments, tokens, question=question)


def _written(question: ToolQuestion) -> list[Json]:
    return [question.message, dict(question.schema), question.url, question.state]


def _question(written: Json) -> ToolQuestion | None:
    match written:
        case [str(message), dict(schema), str(url), state]:
            return ToolQuestion(message, schema, url, state)
        case _:
            return None
