"""Recovery rules: the stable name of each rule and a sentence that explains it.

This one table serves the recordings in `unisono trace`, the documentation and other explanations. Names appear in
headers, metrics and notes; they do not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OF_READING: Final[Mapping[str, str]] = {
    "bad-token": "An invalid token id was dropped.",
    "channel-repeated": "A header contained several channels; the last one was used.",
    "channel-spelling": "A misspelled channel was corrected to a known channel.",
    "constrain-empty": "A content type marker without a content type was ignored.",
    "constrain-repeated": "A repeated content type was read once.",
    "cut-header": "The output ended inside a header with only header words; the header was dropped.",
    "doubled-start": "A message was started twice; the second start was used.",
    "echoed-prefix": "The output repeated the end of the prompt; the repetition was dropped.",
    "embedded-call": "A tool call started inside a preamble; the preamble was closed before the call.",
    "empty-channel": "A channel marker had no channel; the text was emitted.",
    "endoftext-stop": "The end-of-text token ended a message; it can complete text but not a call.",
    "foreign-role": "A message had another role than assistant. A declared tool's name with a call's end was read as "
    "that call, an invented system, user or tool message was dropped, and other text was emitted.",
    "free-text-between": "Text between two messages was dropped.",
    "glued-role": "The role and the next header word were not separated; both were read.",
    "header-order": "The content type preceded the recipient; both were read.",
    "header-without-message": "A message ended inside its header; the text after the header words is its body.",
    "marker-in-recipient": "A recipient contained a marker; the marker was removed.",
    "missing-channel": "A message had no channel; its text was emitted.",
    "missing-end": "A message started inside another one; the first was closed.",
    "missing-start": "A message had no start marker; the marker was added.",
    "no-markup": "The text had no Harmony markup; it was emitted.",
    "not-a-tool": "The recipient is not a tool; the body was read as text on its channel.",
    "recipient-repeated": "A header contained several recipients; the first that is a tool was used.",
    "recipient-spelling": "A misspelled recipient was corrected to the only declared tool that it can mean.",
    "restored-stop": "The backend hides the token that ended generation; the token was restored.",
    "stray-header-words": "Header words without meaning were ignored.",
    "stray-special": "A misplaced special token was dropped.",
    "trailing-stop": "A second stop token after a finished message was dropped.",
    "type-as-recipient": "A content type was in the place of the recipient; it was read as a content type.",
    "undecodable-header": "A header contained bytes that are not UTF-8; they were replaced.",
    "unfinished-call": "A tool call had no stop token; it was neither run nor emitted.",
    "unknown-channel": "The channel does not exist; the text was emitted.",
}
"""Recoveries from malformed Harmony output."""

OF_THE_ANSWER: Final[Mapping[str, str]] = {
    "analysis-only": "The model stopped after its reasoning; the gateway started the answer and the model continued.",
    "code-fence": "Code fences around a JSON answer were removed.",
    "reasoning-budget": "The reasoning budget was used up; the gateway ended the reasoning and the model continued.",
    "regenerated-answer": "An answer did not have the required format; it was generated again.",
    "regenerated-call": "A call had unusable arguments; it was generated again.",
    "repetition": "The model repeated itself; reasoning was ended, blanks in JSON removed, other output cut off.",
    "tool-not-allowed": "The model called a tool that is not allowed now; the call was not emitted.",
}
"""Recoveries from an unsuitable or missing answer."""

OF_HOSTED_TOOLS: Final[Mapping[str, str]] = {
    "approval-void": "An approved call belongs to a tool that may no longer be run; the model was informed.",
    "bad-tool-arguments": "The arguments of a server tool call were not a JSON object; the model was informed.",
    "call-limit": "The limit of server tool calls was reached; a further call was not run and the model was informed.",
    "call-not-repeated": "It is unknown whether a server tool call was executed; it was not repeated.",
    "late-call": "A server tool was called after the end of all server tools; the call was neither run nor emitted.",
    "repeated-call": "A server tool was called repeatedly with the same arguments; the model was informed.",
    "tool-deadline": "The time limit for server tools was reached; the model was informed.",
    "tool-left-out": "A server tool was unavailable or could not be declared; the request continued without it.",
    "tools-ended": "No more server tools were run; the gateway started the answer and the model continued.",
    "unknown-tool": "The model called an unknown server tool; it was informed of the available tools.",
}
"""Recoveries from invalid calls of server tools."""

RULES: Final[Mapping[str, str]] = {**OF_READING, **OF_THE_ANSWER, **OF_HOSTED_TOOLS}
