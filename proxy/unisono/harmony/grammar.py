"""The tables: which marker may follow in which state, what is done about one that may not, and the name of every
repair.

A new malformed shape is a new row here. What a held header means is not a question of transitions: see `header.py`.
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


RULES: dict[str, str] = {
    "analysis-only": "The model thought and stopped without an answer; the answer was opened and the model continued.",
    "approval-void": "A call was approved that belongs to no tool that may be run any more; the model was told.",
    "bad-token": "An id that is no token was dropped.",
    "bad-tool-arguments": "A hosted tool was called with arguments that are no JSON object; the model was told.",
    "call-limit": "The turn's calls of hosted tools were used up; a further one was not made and the model was told.",
    "call-not-repeated": "It is not known whether a call of a hosted tool was carried out; it was not made again.",
    "channel-repeated": "A header named its channel more than once; the last one counts.",
    "channel-spelling": "A misspelt channel was read as the known one it stands for.",
    "code-fence": "Code fences stood around an answer that has to be JSON; they were taken off.",
    "constrain-empty": "A content type marker without a content type was ignored.",
    "constrain-repeated": "A content type given twice was read once.",
    "cut-header": "The output ended inside a header that held nothing but header words; it says nothing.",
    "doubled-start": "A message was started twice; the second start counts.",
    "echoed-prefix": "The output repeated the end of the prompt; the repetition was dropped.",
    "embedded-call": "A tool call began inside a preamble; the preamble was closed and the call is a call.",
    "empty-channel": "A channel marker without a channel; the text is shown.",
    "endoftext-stop": "The end-of-text token ended a message; it completes text but never a call.",
    "foreign-role": "A message of another role than assistant; a declared tool's name with a call's end is that call, "
    "an invented system, user or tool message is dropped, other text is shown.",
    "free-text-between": "Text between two messages belongs to none and was dropped.",
    "glued-role": "The role ran into the next word of the header; both were read.",
    "header-order": "The content type stood before the recipient; both were read.",
    "header-without-message": "A message ended inside its header; what follows the header's words is its body.",
    "late-call": "A hosted tool was called when there was nothing more to be called; nothing of it is run or shown.",
    "marker-in-recipient": "A marker leaked into a recipient; the name was cleaned.",
    "markerless": "The backend strips markers; messages were split at channel words.",
    "missing-channel": "A message without a channel; its text is shown.",
    "missing-end": "A message began inside another; the first was closed.",
    "missing-start": "A message began without its start marker; it was supplied.",
    "no-markup": "Text without any Harmony; it is shown.",
    "not-a-tool": "A recipient that is no tool; the body is text on its channel.",
    "reasoning-budget": "The tokens for thoughts were used up; the model was made to come to something.",
    "recipient-repeated": "A header named several recipients; the first that is a tool counts.",
    "recipient-spelling": "A misspelt recipient was read as the one declared tool it can stand for.",
    "regenerated-answer": "An answer was not of the form that was asked for; it was generated again.",
    "regenerated-call": "A call had arguments that could not be used; it was generated again.",
    "repeated-call": "A hosted tool was called again and again with the same arguments; the model was told.",
    "repetition": "The same was generated over and over; thoughts were ended, anything else was broken off.",
    "restored-stop": "The backend hides the token it stopped at; the terminator was put back.",
    "stray-header-words": "Words in a header that mean nothing were ignored.",
    "stray-special": "A special token that has no business there was dropped.",
    "tool-deadline": "The turn's time for hosted tools was over; the model was told.",
    "tool-left-out": "A hosted tool could not be had, or not be declared to the model; the turn went without it.",
    "tool-not-allowed": "A tool was called that may not be called now; nothing of the call was shown.",
    "tools-ended": "No more hosted tools were run; the answer was opened and the model continued.",
    "trailing-stop": "A second terminator after a finished message was dropped.",
    "type-as-recipient": "A content type stood where a recipient stands; it was read as a content type.",
    "undecodable-header": "A header held bytes that are not UTF-8; they were replaced.",
    "unfinished-call": "A tool call without its terminator is no call; nothing of it is run or shown.",
    "unknown-channel": "A channel that does not exist; the text is shown.",
    "unknown-tool": "A hosted tool was called that there is not; the model was told what there is.",
}
"""Every repair by its stable name, with the sentence shown to people."""
