"""Verdicts on server tool calls: make the call, request an approval, or reply with an error.

Consecutive invalid calls and consecutive equal calls are limited, so that every answer ends. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from unisono.core.frozen import dataclass
from unisono.core.server_tool_arguments import ToolArguments
from unisono.core.tool_host import ServerToolCall

# Verdicts, and names of rules (see `core.recovery_rules.RULES`).
MAKE: Final = "make"
ASK: Final = "ask"
UNKNOWN_TOOL: Final = "unknown-tool"
BAD_ARGUMENTS: Final = "bad-tool-arguments"
REPEATED: Final = "repeated-call"
NO_CALLS_LEFT: Final = "call-limit"
NO_TIME_LEFT: Final = "tool-deadline"
VOID: Final = "approval-void"
ENDED: Final = "tools-ended"
NOT_REPEATED: Final = "call-not-repeated"

MAX_FAULTS: Final = 3  # number of consecutive invalid calls after which no more calls are made
MAX_EQUAL_CALLS: Final = 2  # number of consecutive equal calls that are made
MAX_CALLS: Final = 512  # limit of calls for a request that sets no limit

OUTCOME_UNKNOWN: Final = "It is not known whether the call was carried out; it was not repeated."

# Faults that the model can correct. The model gets a few error replies before further calls are refused.
MODEL_FAULTS: Final = frozenset({UNKNOWN_TOOL, BAD_ARGUMENTS})


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """A refused call, with the facts that its error reply states.

    `problem` describes invalid arguments. `names_near` are the names of tools that the model may have meant.
    `can_repeat`: the client may continue the answer in another request, with more time.
    """

    name: str
    problem: str
    names_near: Sequence[str]
    can_repeat: bool


def _unknown(call: RefusedCall) -> str:
    near = ", ".join(call.names_near)
    return f"There is no tool {call.name!r}. " + (f"There is: {near}." if near else "There are no tools.")


def _no_time_left(call: RefusedCall) -> str:
    then = "It may be made again." if call.can_repeat else "Answer with what is known."
    return f"No time is left for calls. The call was not made. {then}"


ARGUMENTS_HINT: Final = "Give a JSON object that fits the tool."

# text that the model reads instead of a result, by rule
REFUSALS: Final[Mapping[str, Callable[[RefusedCall], str]]] = {
    UNKNOWN_TOOL: _unknown,
    BAD_ARGUMENTS: lambda call: f"The arguments cannot be sent: {call.problem}. {ARGUMENTS_HINT}",
    REPEATED: lambda *_: "The same call was made before, with the same arguments. It was not made again.",
    NO_CALLS_LEFT: lambda *_: "No calls are left. The call was not made. Answer with what is known.",
    NO_TIME_LEFT: _no_time_left,
    VOID: lambda *_: "The call was approved, but the tool is not available any more. The call was not made.",
    ENDED: lambda *_: "No more calls are made. Answer with what is known.",
}


@dataclass(slots=True)
class CallBudget:
    """Counts of a request's calls, and their limits.

    `limit` is the largest number of calls. `rounds_left` is the number of rounds before the answer pauses.
    `rounds_left` is 0 or negative if the answer has to pause or the time for tools has passed, and None if the answer
    never pauses.
    """

    limit: int
    rounds_left: int | None = None
    exhausted: bool = False  # no more calls are made
    _made: int = 0
    _faults: int = 0
    _alike: int = 0
    _last: str = ""

    @property
    def paused(self) -> bool:
        """Return whether the answer pauses after this round, until the client continues it."""
        return self.rounds_left is not None and self.rounds_left <= 0

    def start_round(self) -> None:
        if self.rounds_left is not None:
            self.rounds_left -= 1

    def record_timeout(self) -> None:
        if self.rounds_left is None:
            self.exhausted = True
        else:
            self.rounds_left = 0

    def judge(
        self, call: ServerToolCall, arguments: ToolArguments, *, is_known: bool, needs_approval: bool, late: bool
    ) -> str:
        """Return the verdict on a call: `MAKE`, `ASK`, or the rule of an error reply.

        `is_known`: the tool is offered. `needs_approval`: the client must approve such a call before it runs. `late`:
        the time for tools has passed.
        """
        # The limits of the request are checked first. Otherwise the model would correct a call that cannot be made
        # anyway.
        if self.exhausted:
            return ENDED
        if late:
            return NO_TIME_LEFT
        if self._made >= self.limit:
            return NO_CALLS_LEFT
        if not is_known:
            return VOID if call.approval else UNKNOWN_TOOL
        if arguments.problem:
            return BAD_ARGUMENTS
        if self._alike >= MAX_EQUAL_CALLS and arguments.digest == self._last:
            return REPEATED
        if needs_approval and not call.approval:
            return ASK
        return MAKE

    def record(self, arguments: ToolArguments, verdict: str) -> None:
        """Record the verdict on a call with these arguments."""
        self._alike = self._alike + 1 if arguments.digest == self._last else 1
        self._last = arguments.digest
        self._made += verdict == MAKE
        self._faults = self._faults + 1 if verdict in MODEL_FAULTS else 0
        # The first error reply informs the model about the repetition. If the model repeats the call even then, it does
        # not stop by itself, so no more calls are made.
        once_more = verdict == REPEATED and self._alike > MAX_EQUAL_CALLS + 1
        self.exhausted = self.exhausted or verdict == NO_CALLS_LEFT or self._faults >= MAX_FAULTS or once_more
        if verdict == NO_TIME_LEFT:
            self.record_timeout()
