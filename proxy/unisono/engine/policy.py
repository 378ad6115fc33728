"""What the step plan does at each of its moments, as tables: which message there is, and what it is worth.

Pure. A moment is a header that is known, a message that is complete, or the end of a generation; what comes of it
follows from what the answer still owes.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from unisono.core.json_syntax import json_kind


class Owed(Enum):
    """What an answer still owes."""

    NOTHING = auto()
    CALL = auto()
    """A call of a tool that has to be called."""
    FORM = auto()
    """A final answer of the form that was asked for."""


class Message(Enum):
    """What a message is to the plan."""

    THOUGHT = auto()
    LATE_THOUGHT = auto()
    """A thought when the budget for them is used up."""
    PREAMBLE = auto()
    ANSWER = auto()
    WANTED = auto()
    """A call of a tool that has to be called."""
    STRICT = auto()
    """A call of a tool whose arguments have to match its schema."""
    CALL = auto()
    BARRED = auto()
    """A call of a tool that may not be called."""


class Act(Enum):
    """What is done about a message when its header is known."""

    PASS = auto()
    GUIDE = auto()
    """Have the backend keep to what the body has to be, where it can; else look at the body when it is complete."""
    FORCE = auto()
    """Open a call of a tool that has to be called in its place."""
    SKIP = auto()
    """Close it at once and have the model choose again; the second time in a row, open the answer."""


_BY_OWED: Final[dict[Owed, dict[Message, Act]]] = {
    Owed.NOTHING: {},
    Owed.CALL: {
        Message.LATE_THOUGHT: Act.FORCE,
        Message.PREAMBLE: Act.FORCE,
        Message.ANSWER: Act.FORCE,
        Message.STRICT: Act.FORCE,
        Message.CALL: Act.FORCE,
        Message.BARRED: Act.FORCE,
    },
    Owed.FORM: {Message.ANSWER: Act.GUIDE},
}
_ALWAYS: Final[dict[Message, Act]] = {
    Message.LATE_THOUGHT: Act.SKIP,
    Message.WANTED: Act.GUIDE,
    Message.STRICT: Act.GUIDE,
}

OPENING: Final[dict[tuple[Owed, Message], Act]] = {
    (owed, message): special.get(message, _ALWAYS.get(message, Act.PASS))
    for owed, special in _BY_OWED.items()
    for message in Message
}
"""What is done about a message when its header is known."""


class Fault(Enum):
    """What is wrong with the body of a complete message."""

    NONE = auto()
    BROKEN = auto()
    """It is no JSON, or no object where it has to be one."""
    UNLIKE = auto()
    """It is one, and its schema does not allow it."""


def fault_of(text: str, *, objects: bool) -> Fault:
    """Whether a body is JSON, or with `objects` a JSON object; no schema is looked at."""
    kind = json_kind(text)
    return Fault.NONE if kind is not None and (kind is dict or not objects) else Fault.BROKEN


class End(Enum):
    """What is done about a message that is complete and was not shown."""

    SAID = auto()
    AGAIN = auto()
    """Generate it again; when that was done often enough, it is said as it is."""
    REFUSE = auto()
    """Tell the model that the tool is not available; the second time, open the answer."""


_JUDGED: Final = frozenset({Message.WANTED, Message.STRICT, Message.ANSWER})
"""Messages whose schema counts."""

CLOSING: Final[dict[tuple[Message, Fault], End]] = {
    (message, fault): End.REFUSE
    if message is Message.BARRED
    else End.AGAIN
    if fault is Fault.BROKEN or (fault is Fault.UNLIKE and message in _JUDGED)
    else End.SAID
    for message in Message
    for fault in Fault
}
"""What is done about a message that is complete and was not shown."""

MOST_AGAIN: Final = 2
"""So often a message is generated again."""
MAX_TRIMS: Final = 2  # per attempt at a message
MOST_MOVES: Final = 16
"""So often a generation is stopped within one step; then the model is left alone."""
