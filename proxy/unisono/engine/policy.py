"""What the step plan does at each of its moments, as tables: which message there is, and what it is worth.

Pure. A moment is a header that is known, a message that is complete, or the end of a generation; what comes of it
follows from what the answer still owes.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from unisono.core.json_syntax import json_kind


class Obligation(Enum):
    """What an answer still owes."""

    NOTHING = auto()
    CALL = auto()
    """A call of a tool that has to be called."""
    FORM = auto()
    """A final answer of the form that was asked for."""


class MessageKind(Enum):
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


class HeaderAction(Enum):
    """What is done about a message when its header is known."""

    PASS = auto()
    GUIDE = auto()
    """Have the backend keep to what the body has to be, where it can; else look at the body when it is complete."""
    FORCE = auto()
    """Open a call of a tool that has to be called in its place."""
    SKIP = auto()
    """Close it at once and have the model choose again; the second time in a row, open the answer."""


_BY_OWED: Final[dict[Obligation, dict[MessageKind, HeaderAction]]] = {
    Obligation.NOTHING: {},
    Obligation.CALL: {
        MessageKind.LATE_THOUGHT: HeaderAction.FORCE,
        MessageKind.PREAMBLE: HeaderAction.FORCE,
        MessageKind.ANSWER: HeaderAction.FORCE,
        MessageKind.STRICT: HeaderAction.FORCE,
        MessageKind.CALL: HeaderAction.FORCE,
        MessageKind.BARRED: HeaderAction.FORCE,
    },
    Obligation.FORM: {MessageKind.ANSWER: HeaderAction.GUIDE},
}
_ALWAYS: Final[dict[MessageKind, HeaderAction]] = {
    MessageKind.LATE_THOUGHT: HeaderAction.SKIP,
    MessageKind.WANTED: HeaderAction.GUIDE,
    MessageKind.STRICT: HeaderAction.GUIDE,
}

OPENING: Final[dict[tuple[Obligation, MessageKind], HeaderAction]] = {
    (owed, message): special.get(message, _ALWAYS.get(message, HeaderAction.PASS))
    for owed, special in _BY_OWED.items()
    for message in MessageKind
}
"""What is done about a message when its header is known."""


class BodyFault(Enum):
    """What is wrong with the body of a complete message."""

    NONE = auto()
    BROKEN = auto()
    """It is no JSON, or no object where it has to be one."""
    UNLIKE = auto()
    """It is one, and its schema does not allow it."""


def fault_of(text: str, *, objects: bool) -> BodyFault:
    """Whether a body is JSON, or with `objects` a JSON object; no schema is looked at."""
    kind = json_kind(text)
    return BodyFault.NONE if kind is not None and (kind is dict or not objects) else BodyFault.BROKEN


class BodyAction(Enum):
    """What is done about a message that is complete and was not shown."""

    SAID = auto()
    AGAIN = auto()
    """Generate it again; when that was done often enough, it is said as it is."""
    REFUSE = auto()
    """Tell the model that the tool is not available; the second time, open the answer."""


_JUDGED: Final = frozenset({MessageKind.WANTED, MessageKind.STRICT, MessageKind.ANSWER})
"""Messages whose schema counts."""

CLOSING: Final[dict[tuple[MessageKind, BodyFault], BodyAction]] = {
    (message, fault): BodyAction.REFUSE
    if message is MessageKind.BARRED
    else BodyAction.AGAIN
    if fault is BodyFault.BROKEN or (fault is BodyFault.UNLIKE and message in _JUDGED)
    else BodyAction.SAID
    for message in MessageKind
    for fault in BodyFault
}
"""What is done about a message that is complete and was not shown."""

MOST_AGAIN: Final = 2
"""So often a message is generated again."""
MAX_TRIMS: Final = 2  # per attempt at a message
MOST_MOVES: Final = 16
"""So often a generation is stopped within one step; then the model is left alone."""
