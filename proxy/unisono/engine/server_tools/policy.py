"""Verdicts on server tool calls: make the call, request an approval, or reply with an error.

Pure. Calls without effect and repeated calls are limited, so that every answer ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from unisono.core.tool_arguments import ToolArguments
from unisono.engine.server_tools.tools import OfferedServerTools, ServerToolCall

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

MAX_FAULTS: Final = 3  # consecutive faults of the model that end its calling
MAX_EQUAL_CALLS: Final = 2  # consecutive equal calls that are made
MAX_CALLS: Final = 512  # calls of a request without a limit of its own

OUTCOME_UNKNOWN: Final = "It is not known whether the call was carried out; it was not repeated."

MODEL_FAULTS: Final = frozenset({UNKNOWN_TOOL, BAD_ARGUMENTS})


def _unknown(call: ServerToolCall, _: ToolArguments, tools: OfferedServerTools) -> str:
    near = ", ".join(tools.names_near(call))
    return f"There is no tool {call.name!r}. " + (f"There is: {near}." if near else "There are no tools.")


def _no_time_left(_: ServerToolCall, __: ToolArguments, tools: OfferedServerTools) -> str:
    then = "Answer with what is known." if tools.hosting.pause_after is None else "It may be made again."
    return f"No time is left for calls. The call was not made. {then}"


ARGUMENTS_HINT: Final = "Give a JSON object that fits the tool."

# text that the model reads instead of a result, by rule
REFUSALS: Final[Mapping[str, Callable[[ServerToolCall, ToolArguments, OfferedServerTools], str]]] = {
    UNKNOWN_TOOL: _unknown,
    BAD_ARGUMENTS: lambda _, arguments, __: f"The arguments cannot be sent: {arguments.problem}. {ARGUMENTS_HINT}",
    REPEATED: lambda *_: "The same call was made before, with the same arguments. It was not made again.",
    NO_CALLS_LEFT: lambda *_: "No calls are left. The call was not made. Answer with what is known.",
    NO_TIME_LEFT: _no_time_left,
    VOID: lambda *_: "The call was approved, but the tool is not available any more. The call was not made.",
    ENDED: lambda *_: "No more calls are made. Answer with what is known.",
}


@dataclass(slots=True)
class CallBudget:
    """The calls of a request so far; `limit` is the number of calls allowed."""

    tools: OfferedServerTools
    limit: int
    exhausted: bool = False  # no more calls are made
    _late: bool = False  # the time of the request has passed
    _rounds: int = 0
    _made: int = 0
    _faults: int = 0
    _alike: int = 0
    _last: str = ""

    @property
    def paused(self) -> bool:
        """Return whether the answer pauses after this round, to be continued by the client."""
        after = self.tools.hosting.pause_after
        return after is not None and (self._late or self._rounds >= after)

    def start_round(self) -> None:
        self._rounds += 1

    def record_timeout(self) -> None:
        self._late = True
        self.exhausted = self.exhausted or self.tools.hosting.pause_after is None

    def judge(self, call: ServerToolCall, arguments: ToolArguments, *, late: bool = False) -> str:
        """Return `MAKE`, `ASK` or the rule of an error reply.

        `late`: the time of the request has passed.
        """
        tool = self.tools.tool(call.name)
        if self.exhausted:
            return ENDED
        if late:
            return NO_TIME_LEFT
        if self._made >= self.limit:
            return NO_CALLS_LEFT
        if tool is None:
            return VOID if call.approval else UNKNOWN_TOOL
        if arguments.problem:
            return BAD_ARGUMENTS
        if self._alike >= MAX_EQUAL_CALLS and arguments.digest == self._last:
            return REPEATED
        if not call.approval and self.tools.server(tool).approval.needed(tool):
            return ASK
        return MAKE

    def record(self, arguments: ToolArguments, verdict: str) -> None:
        """Record the verdict on a call with these arguments."""
        self._alike = self._alike + 1 if arguments.digest == self._last else 1
        self._last = arguments.digest
        self._made += verdict == MAKE
        self._faults = self._faults + 1 if verdict in MODEL_FAULTS else 0
        once_more = verdict == REPEATED and self._alike > MAX_EQUAL_CALLS + 1
        self.exhausted = self.exhausted or verdict == NO_CALLS_LEFT or self._faults >= MAX_FAULTS or once_more
        if verdict == NO_TIME_LEFT:
            self.record_timeout()
