"""The tables: which marker may follow in which state, and what is done about one that may not.

A new malformed shape is a new row here, and its repair has a sentence in `core.rules`. What a held header means is not
a question of transitions: see `header.py`.
"""

from __future__ import annotations

from enum import Enum, auto

from unisono.core.generation import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    ENDOFTEXT,
    FIRST_SPECIAL,
    MESSAGE,
    RETURN,
    START,
    VOCABULARY,
)


class State(Enum):
    """Where in the output the next token stands."""

    HEADER = auto()
    """Inside a header; its tokens are held until it is decided what they mean."""
    BODY = auto()
    BETWEEN = auto()
    """After a message's terminator."""
    GAP = auto()
    """After a terminator, behind text that may be a header without its start or nothing at all; held."""


class Mark(Enum):
    """What a token is to the grammar."""

    TEXT = auto()
    START = auto()
    CHANNEL = auto()
    CONSTRAIN = auto()
    MESSAGE = auto()
    END = auto()
    RETURN = auto()
    CALL = auto()
    ENDOFTEXT = auto()
    SPECIAL = auto()
    """A special token that gpt-oss has no use for."""
    BAD = auto()
    """An id outside the vocabulary."""


MARKS: dict[int, Mark] = {
    START: Mark.START,
    CHANNEL: Mark.CHANNEL,
    CONSTRAIN: Mark.CONSTRAIN,
    MESSAGE: Mark.MESSAGE,
    END: Mark.END,
    RETURN: Mark.RETURN,
    CALL: Mark.CALL,
    ENDOFTEXT: Mark.ENDOFTEXT,
}


def mark_of(token: int) -> Mark:
    if 0 <= token < FIRST_SPECIAL:
        return Mark.TEXT
    return MARKS.get(token) or (Mark.SPECIAL if 0 <= token < VOCABULARY else Mark.BAD)


class Step(Enum):
    """What `repair` does with a token."""

    PASS = auto()
    """Body text: forward it."""
    HOLD = auto()
    """Part of a header, or of what may be one: keep it."""
    OPEN = auto()
    """A message starts: begin a header."""
    RESOLVE = auto()
    """The header is complete: decide what it means and open the body."""
    CLOSE = auto()
    """The message is complete."""
    CLOSE_TEXT = auto()
    """A terminator for text that completes no call."""
    CUT = auto()
    """A new message begins inside a body: close it; a call closed so is no call."""
    BODYLESS = auto()
    """A terminator inside a header: what is held is header and body in one."""
    CHANNEL = auto()
    """A channel marker in a header: a part of it, or the next header behind a message that never got its own end."""
    RESTART = auto()
    """A start inside a header: the same header again, or a message that never got its body."""
    SUPPLY_START = auto()
    """A header begins without its start: supply it."""
    LEAVE_GAP = auto()
    """What is held between messages turns out to be a header without its start, or text for nobody."""
    DROP_GAP = auto()
    """What is held between messages is text for nobody; then go on as from BETWEEN."""
    DROP = auto()


STEPS: dict[tuple[State, Mark], tuple[Step, str | None]] = {
    (State.HEADER, Mark.TEXT): (Step.HOLD, None),
    (State.HEADER, Mark.CHANNEL): (Step.CHANNEL, None),
    (State.HEADER, Mark.CONSTRAIN): (Step.HOLD, None),
    (State.HEADER, Mark.MESSAGE): (Step.RESOLVE, None),
    (State.HEADER, Mark.START): (Step.RESTART, None),
    (State.HEADER, Mark.END): (Step.BODYLESS, None),
    (State.HEADER, Mark.RETURN): (Step.BODYLESS, None),
    (State.HEADER, Mark.CALL): (Step.BODYLESS, None),
    (State.HEADER, Mark.ENDOFTEXT): (Step.BODYLESS, "endoftext-stop"),
    (State.HEADER, Mark.SPECIAL): (Step.DROP, "stray-special"),
    (State.HEADER, Mark.BAD): (Step.DROP, "bad-token"),
    (State.BODY, Mark.TEXT): (Step.PASS, None),
    (State.BODY, Mark.END): (Step.CLOSE, None),
    (State.BODY, Mark.RETURN): (Step.CLOSE, None),
    (State.BODY, Mark.CALL): (Step.CLOSE, None),
    (State.BODY, Mark.ENDOFTEXT): (Step.CLOSE_TEXT, "endoftext-stop"),
    (State.BODY, Mark.START): (Step.CUT, "missing-end"),
    (State.BODY, Mark.CHANNEL): (Step.CUT, "missing-end"),
    (State.BODY, Mark.MESSAGE): (Step.DROP, "stray-special"),
    (State.BODY, Mark.CONSTRAIN): (Step.DROP, "stray-special"),
    (State.BODY, Mark.SPECIAL): (Step.DROP, "stray-special"),
    (State.BODY, Mark.BAD): (Step.DROP, "bad-token"),
    (State.BETWEEN, Mark.TEXT): (Step.HOLD, None),
    (State.BETWEEN, Mark.START): (Step.OPEN, None),
    (State.BETWEEN, Mark.CHANNEL): (Step.SUPPLY_START, "missing-start"),
    (State.BETWEEN, Mark.CONSTRAIN): (Step.HOLD, None),
    (State.BETWEEN, Mark.MESSAGE): (Step.SUPPLY_START, "missing-start"),
    (State.BETWEEN, Mark.END): (Step.DROP, "trailing-stop"),
    (State.BETWEEN, Mark.RETURN): (Step.DROP, "trailing-stop"),
    (State.BETWEEN, Mark.CALL): (Step.DROP, "trailing-stop"),
    (State.BETWEEN, Mark.ENDOFTEXT): (Step.DROP, "endoftext-stop"),
    (State.BETWEEN, Mark.SPECIAL): (Step.DROP, "stray-special"),
    (State.BETWEEN, Mark.BAD): (Step.DROP, "bad-token"),
    (State.GAP, Mark.TEXT): (Step.HOLD, None),
    (State.GAP, Mark.CONSTRAIN): (Step.HOLD, None),
    (State.GAP, Mark.CHANNEL): (Step.LEAVE_GAP, None),
    (State.GAP, Mark.MESSAGE): (Step.LEAVE_GAP, None),
    (State.GAP, Mark.START): (Step.DROP_GAP, "free-text-between"),
    (State.GAP, Mark.END): (Step.DROP_GAP, "free-text-between"),
    (State.GAP, Mark.RETURN): (Step.DROP_GAP, "free-text-between"),
    (State.GAP, Mark.CALL): (Step.DROP_GAP, "free-text-between"),
    (State.GAP, Mark.ENDOFTEXT): (Step.DROP_GAP, "free-text-between"),
    (State.GAP, Mark.SPECIAL): (Step.DROP, "stray-special"),
    (State.GAP, Mark.BAD): (Step.DROP, "bad-token"),
}
"""For every mark in every state: what to do, and the rule's name where doing it always is a repair."""
