"""Recovery rules: the stable name of each rule and a sentence that explains it.

This one table serves the recordings in `unisono trace`, the documentation and other explanations. Names appear in
headers, metrics and notes; they do not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OF_READING: Final[Mapping[str, str]] = {
    "bad-token": "An id that is no token was dropped.",
    "channel-repeated": "A header named its channel more than once; the last one counts.",
    "channel-spelling": "A misspelt channel was read as the known one it stands for.",
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
    "marker-in-recipient": "A marker leaked into a recipient; the name was cleaned.",
    "missing-channel": "A message without a channel; its text is shown.",
    "missing-end": "A message began inside another; the first was closed.",
    "missing-start": "A message began without its start marker; it was supplied.",
    "no-markup": "Text without any Harmony; it is shown.",
    "not-a-tool": "A recipient that is no tool; the body is text on its channel.",
    "recipient-repeated": "A header named several recipients; the first that is a tool counts.",
    "recipient-spelling": "A misspelt recipient was read as the one declared tool it can stand for.",
    "restored-stop": "The backend hides the token it stopped at; the terminator was put back.",
    "stray-header-words": "Words in a header that mean nothing were ignored.",
    "stray-special": "A special token that has no business there was dropped.",
    "trailing-stop": "A second terminator after a finished message was dropped.",
    "type-as-recipient": "A content type stood where a recipient stands; it was read as a content type.",
    "undecodable-header": "A header held bytes that are not UTF-8; they were replaced.",
    "unfinished-call": "A tool call without its terminator is no call; nothing of it is run or shown.",
    "unknown-channel": "A channel that does not exist; the text is shown.",
}
"""Recoveries from malformed Harmony output."""

OF_THE_ANSWER: Final[Mapping[str, str]] = {
    "analysis-only": "The model thought and stopped without an answer; the answer was opened and the model continued.",
    "code-fence": "Code fences stood around an answer that has to be JSON; they were taken off.",
    "reasoning-budget": "The tokens for thoughts were used up; the model was made to come to something.",
    "regenerated-answer": "An answer was not of the form that was asked for; it was generated again.",
    "regenerated-call": "A call had arguments that could not be used; it was generated again.",
    "repetition": "The same was repeated; thoughts were ended, blanks in JSON removed, anything else broken off.",
    "tool-not-allowed": "A tool was called that may not be called now; nothing of the call was shown.",
}
"""Recoveries from an unsuitable or missing answer."""

OF_HOSTED_TOOLS: Final[Mapping[str, str]] = {
    "approval-void": "A call was approved that belongs to no tool that may be run any more; the model was told.",
    "bad-tool-arguments": "A hosted tool was called with arguments that are no JSON object; the model was told.",
    "call-limit": "The turn's calls of hosted tools were used up; a further one was not made and the model was told.",
    "call-not-repeated": "It is not known whether a call of a hosted tool was carried out; it was not made again.",
    "late-call": "A hosted tool was called when there was nothing more to be called; nothing of it is run or shown.",
    "repeated-call": "A hosted tool was called again and again with the same arguments; the model was told.",
    "tool-deadline": "The turn's time for hosted tools was over; the model was told.",
    "tool-left-out": "A hosted tool could not be had, or not be declared to the model; the turn went without it.",
    "tools-ended": "No more hosted tools were run; the answer was opened and the model continued.",
    "unknown-tool": "A hosted tool was called that there is not; the model was told what there is.",
}
"""Recoveries from invalid calls of server tools."""

RULES: Final[Mapping[str, str]] = {**OF_READING, **OF_THE_ANSWER, **OF_HOSTED_TOOLS}
