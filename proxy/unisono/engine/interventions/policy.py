"""Tables of the intervention policy: kinds of messages, and the action for each kind.

`OPENING` is used when the header of a message is known, and `CLOSING` when a message is complete. The action depends on
the kind of the message, on the obligation that the answer still has, and on the fault of the body. No I/O.
"""

from __future__ import annotations

from enum import auto
from typing import Final

from unisono.core.frozen import TableKey
from unisono.core.json_syntax import json_kind


class Obligation(TableKey):
    """Obligation that an answer still has to meet."""

    NOTHING = auto()
    CALL = auto()  # call one of the required tools
    FORM = auto()  # give a final answer of the required form


class MessageKind(TableKey):
    """Kind of a message, as the policy distinguishes them."""

    THOUGHT = auto()
    LATE_THOUGHT = auto()  # reasoning after the reasoning budget is used up
    PREAMBLE = auto()
    ANSWER = auto()
    WANTED = auto()  # a call to a required tool
    STRICT = auto()  # a call to a tool whose arguments have to match its schema
    CALL = auto()
    BARRED = auto()  # a call to a tool that may not be called
    UNDECLARED = auto()  # a call to a tool that the request does not declare


class HeaderAction(TableKey):
    """Action that is taken when the header of a message is complete."""

    PASS = auto()
    GUIDE = auto()  # Have the backend enforce the form of the body if it can; otherwise check the complete body.
    FORCE = auto()  # open a call to a required tool instead
    # Close the message at once and let the model begin a different one; the second time in a row, open the answer.
    SKIP = auto()


_BY_OBLIGATION: Final[dict[Obligation, dict[MessageKind, HeaderAction]]] = {
    Obligation.NOTHING: {},
    Obligation.CALL: {
        MessageKind.LATE_THOUGHT: HeaderAction.FORCE,
        MessageKind.PREAMBLE: HeaderAction.FORCE,
        MessageKind.ANSWER: HeaderAction.FORCE,
        MessageKind.STRICT: HeaderAction.FORCE,
        MessageKind.CALL: HeaderAction.FORCE,
        MessageKind.BARRED: HeaderAction.FORCE,
        MessageKind.UNDECLARED: HeaderAction.FORCE,
    },
    Obligation.FORM: {MessageKind.ANSWER: HeaderAction.GUIDE},
}
_ALWAYS: Final[dict[MessageKind, HeaderAction]] = {
    MessageKind.LATE_THOUGHT: HeaderAction.SKIP,
    MessageKind.WANTED: HeaderAction.GUIDE,
    MessageKind.STRICT: HeaderAction.GUIDE,
}

# Action for a message with a known header, by obligation and message kind.
OPENING: Final[dict[tuple[Obligation, MessageKind], HeaderAction]] = {
    (owed, message): special.get(message, _ALWAYS.get(message, HeaderAction.PASS))
    for owed, special in _BY_OBLIGATION.items()
    for message in MessageKind
}


class BodyFault(TableKey):
    """A fault in the body of a complete message."""

    NONE = auto()
    BROKEN = auto()  # not JSON, or not an object where an object is required
    UNLIKE = auto()  # not allowed by the schema, the grammar or the list of choices


def fault_of(text: str, *, objects: bool) -> BodyFault:
    """Return `BROKEN` if a body is not valid JSON, else `NONE`.

    With `objects`, the body must be a JSON object.
    """
    kind = json_kind(text)
    return BodyFault.NONE if kind is not None and (kind is dict or not objects) else BodyFault.BROKEN


class BodyAction(TableKey):
    """Action for a complete message that was not emitted."""

    EMIT = auto()
    REGENERATE = auto()  # generate the message again; after the last attempt, emit the first attempt
    # Give the model an error result for the call. The second time, open the answer. If an answer was opened before, or
    # the tool is not declared, emit the call as text.
    REFUSE = auto()


# Message kinds that are regenerated if the body violates its schema, grammar or list of choices.
_JUDGED: Final = frozenset({MessageKind.WANTED, MessageKind.STRICT, MessageKind.ANSWER})

# Message kinds that the client or the gateway has to process as calls.
CALLS: Final = frozenset({MessageKind.WANTED, MessageKind.STRICT, MessageKind.CALL})

# Message kinds of calls that are never emitted as calls.
REFUSED: Final = frozenset({MessageKind.BARRED, MessageKind.UNDECLARED})

# Action for a complete message that was not emitted, by message kind and fault.
CLOSING: Final[dict[tuple[MessageKind, BodyFault], BodyAction]] = {
    (message, fault): BodyAction.REFUSE
    if message in REFUSED
    else BodyAction.REGENERATE
    if fault is BodyFault.BROKEN or (fault is BodyFault.UNLIKE and message in _JUDGED)
    else BodyAction.EMIT
    for message in MessageKind
    for fault in BodyFault
}

MAX_REGENERATIONS: Final = 2  # regenerations per message
MAX_TRIMS: Final = 2  # removals of whitespace per attempt at a message
MAX_EDITS: Final = 16  # edits per step; after them, the model continues without interventions
