"""Transition table of repair: the action for each class of token in each state.

To repair a new kind of malformed output, add a row here and a sentence in `core.recovery_rules`. The table says nothing
about the meaning of a buffered header, which `header.py` interprets.
"""

from __future__ import annotations

from enum import auto
from typing import Final

from unisono.core.frozen import TableKey
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


class State(TableKey):
    """Part of the output that the next token belongs to."""

    # Inside a header; its tokens are buffered until their meaning is known.
    HEADER = auto()
    BODY = auto()
    # After a message's terminator.
    BETWEEN = auto()
    # After a terminator and text. The text is buffered: it is a header without its start, the answer, or text to drop.
    GAP = auto()


class TokenMark(TableKey):
    """Class of a token in the grammar."""

    TEXT = auto()
    START = auto()
    CHANNEL = auto()
    CONSTRAIN = auto()
    MESSAGE = auto()
    END = auto()
    RETURN = auto()
    CALL = auto()
    ENDOFTEXT = auto()
    # A special token that gpt-oss does not use.
    SPECIAL = auto()
    # An id outside the vocabulary.
    BAD = auto()


class MarkTable(dict[int, TokenMark]):
    """Token classes by token id; an id that is not in the table gets the class of its range."""

    def __missing__(self, token: int) -> TokenMark:
        if 0 <= token < FIRST_SPECIAL:
            return TokenMark.TEXT
        return TokenMark.SPECIAL if 0 <= token < VOCABULARY else TokenMark.BAD


MARKS: Final = MarkTable(
    {
        START: TokenMark.START,
        CHANNEL: TokenMark.CHANNEL,
        CONSTRAIN: TokenMark.CONSTRAIN,
        MESSAGE: TokenMark.MESSAGE,
        END: TokenMark.END,
        RETURN: TokenMark.RETURN,
        CALL: TokenMark.CALL,
        ENDOFTEXT: TokenMark.ENDOFTEXT,
    }
)


class GrammarAction(TableKey):
    """Action of `repair` for a token."""

    # Body text: forward it.
    PASS = auto()
    # Part of a header, or of a possible one: buffer it.
    HOLD = auto()
    # A message starts: begin a header.
    OPEN = auto()
    # The header is complete: interpret it and open the body.
    RESOLVE = auto()
    # The message is complete.
    CLOSE = auto()
    # A terminator that completes a text, but not a call: close the message.
    CLOSE_TEXT = auto()
    # A new message begins inside a body: close the old one, as incomplete if it is a call.
    CUT = auto()
    # A terminator inside a header: the buffer is header and body in one.
    BODYLESS = auto()
    # A channel marker in a header: it belongs to the header, or begins the next one after a missing end.
    CHANNEL = auto()
    # A start inside a header: the same header again, or a message without a body.
    RESTART = auto()
    # A header begins without its start: supply it.
    SUPPLY_START = auto()
    # A marker after buffered text: the text is a header without its start, or is dropped.
    LEAVE_GAP = auto()
    # A marker after buffered text that is not a header: drop the text, and continue as in BETWEEN.
    DROP_GAP = auto()
    DROP = auto()


# Action for every mark in every state, with the name of the recovery rule if the action is always a repair.
STEPS: dict[tuple[State, TokenMark], tuple[GrammarAction, str | None]] = {
    (State.HEADER, TokenMark.TEXT): (GrammarAction.HOLD, None),
    (State.HEADER, TokenMark.CHANNEL): (GrammarAction.CHANNEL, None),
    (State.HEADER, TokenMark.CONSTRAIN): (GrammarAction.HOLD, None),
    (State.HEADER, TokenMark.MESSAGE): (GrammarAction.RESOLVE, None),
    (State.HEADER, TokenMark.START): (GrammarAction.RESTART, None),
    (State.HEADER, TokenMark.END): (GrammarAction.BODYLESS, None),
    (State.HEADER, TokenMark.RETURN): (GrammarAction.BODYLESS, None),
    (State.HEADER, TokenMark.CALL): (GrammarAction.BODYLESS, None),
    (State.HEADER, TokenMark.ENDOFTEXT): (GrammarAction.BODYLESS, "endoftext-stop"),
    (State.HEADER, TokenMark.SPECIAL): (GrammarAction.DROP, "stray-special"),
    (State.HEADER, TokenMark.BAD): (GrammarAction.DROP, "bad-token"),
    (State.BODY, TokenMark.TEXT): (GrammarAction.PASS, None),
    (State.BODY, TokenMark.END): (GrammarAction.CLOSE, None),
    (State.BODY, TokenMark.RETURN): (GrammarAction.CLOSE, None),
    (State.BODY, TokenMark.CALL): (GrammarAction.CLOSE, None),
    (State.BODY, TokenMark.ENDOFTEXT): (GrammarAction.CLOSE_TEXT, "endoftext-stop"),
    (State.BODY, TokenMark.START): (GrammarAction.CUT, "missing-end"),
    (State.BODY, TokenMark.CHANNEL): (GrammarAction.CUT, "missing-end"),
    (State.BODY, TokenMark.MESSAGE): (GrammarAction.DROP, "stray-special"),
    (State.BODY, TokenMark.CONSTRAIN): (GrammarAction.DROP, "stray-special"),
    (State.BODY, TokenMark.SPECIAL): (GrammarAction.DROP, "stray-special"),
    (State.BODY, TokenMark.BAD): (GrammarAction.DROP, "bad-token"),
    (State.BETWEEN, TokenMark.TEXT): (GrammarAction.HOLD, None),
    (State.BETWEEN, TokenMark.START): (GrammarAction.OPEN, None),
    (State.BETWEEN, TokenMark.CHANNEL): (GrammarAction.SUPPLY_START, "missing-start"),
    (State.BETWEEN, TokenMark.CONSTRAIN): (GrammarAction.HOLD, None),
    (State.BETWEEN, TokenMark.MESSAGE): (GrammarAction.SUPPLY_START, "missing-start"),
    (State.BETWEEN, TokenMark.END): (GrammarAction.DROP, "trailing-stop"),
    (State.BETWEEN, TokenMark.RETURN): (GrammarAction.DROP, "trailing-stop"),
    (State.BETWEEN, TokenMark.CALL): (GrammarAction.DROP, "trailing-stop"),
    (State.BETWEEN, TokenMark.ENDOFTEXT): (GrammarAction.DROP, "endoftext-stop"),
    (State.BETWEEN, TokenMark.SPECIAL): (GrammarAction.DROP, "stray-special"),
    (State.BETWEEN, TokenMark.BAD): (GrammarAction.DROP, "bad-token"),
    (State.GAP, TokenMark.TEXT): (GrammarAction.HOLD, None),
    (State.GAP, TokenMark.CONSTRAIN): (GrammarAction.HOLD, None),
    (State.GAP, TokenMark.CHANNEL): (GrammarAction.LEAVE_GAP, None),
    (State.GAP, TokenMark.MESSAGE): (GrammarAction.LEAVE_GAP, None),
    (State.GAP, TokenMark.START): (GrammarAction.DROP_GAP, "free-text-between"),
    (State.GAP, TokenMark.END): (GrammarAction.DROP_GAP, "free-text-between"),
    (State.GAP, TokenMark.RETURN): (GrammarAction.DROP_GAP, "free-text-between"),
    (State.GAP, TokenMark.CALL): (GrammarAction.DROP_GAP, "free-text-between"),
    (State.GAP, TokenMark.ENDOFTEXT): (GrammarAction.DROP_GAP, "free-text-between"),
    (State.GAP, TokenMark.SPECIAL): (GrammarAction.DROP, "stray-special"),
    (State.GAP, TokenMark.BAD): (GrammarAction.DROP, "bad-token"),
}
