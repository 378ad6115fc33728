"""Recovery rules: the stable name of each rule and a sentence that explains it.

`unisono trace` and the documentation take their explanations from this table. Rule names appear in headers, metrics
and notes, so they must not be changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Names of rules that several modules report or compare.
CODE_FENCE: Final = "code-fence"
DANGLING_PREAMBLE: Final = "dangling-preamble"
MEDIA_LEFT_OUT: Final = "media-left-out"
REASONING_BUDGET: Final = "reasoning-budget"
REGENERATED_ANSWER: Final = "regenerated-answer"
REGENERATED_CALL: Final = "regenerated-call"
REPETITION: Final = "repetition"
TOOL_NOT_ALLOWED: Final = "tool-not-allowed"
UNDECLARED_TOOL: Final = "undeclared-tool"
WRAPPED_INPUT: Final = "wrapped-input"

# Rules that a request may switch off.
SWITCHABLE: Final = frozenset(
    {REGENERATED_CALL, REGENERATED_ANSWER, CODE_FENCE, REPETITION, DANGLING_PREAMBLE, UNDECLARED_TOOL}
)

# Recoveries from malformed Harmony output.
PARSING_RULES: Final[Mapping[str, str]] = {
    "bad-token": "An id outside the vocabulary was dropped.",
    "channel-repeated": "A header named a channel more than once; the last channel was used.",
    "channel-spelling": "A misspelt channel was read as the known channel that it resembles.",
    "constrain-empty": "A content type marker without a content type was ignored.",
    "constrain-repeated": "A header repeated its content type; it was read once.",
    "cut-header": "The output ended inside a header without any message text; the header was dropped.",
    "doubled-start": "A message was started twice; the second start was used.",
    "echoed-prefix": "The output repeated the end of the prompt; the repetition was dropped.",
    "embedded-call": "A tool call began inside a preamble; the preamble was closed and the call was read.",
    "empty-channel": "A channel marker had no channel; the message was read as visible text.",
    "endoftext-stop": "The end-of-text token ended a message; it completes text but never a call.",
    "foreign-role": "The role of a message was not assistant. If the role was the name of a declared tool and the "
    "message ended like a call, it was read as a call to that tool. Otherwise, a message with the role of the system, "
    "a developer, a user or a tool was dropped. Any other message was emitted.",
    "free-text-between": "Text between two messages was dropped.",
    "glued-role": "The role was joined to the next word of the header; both were read.",
    "header-order": "The content type preceded the recipient; both were read.",
    "header-without-message": "A message ended inside its header; the text after the header words was read as its "
    "body.",
    "marker-in-recipient": "A recipient contained a marker; the marker was removed from the name.",
    "missing-channel": "A message had no channel; it was read as visible text.",
    "missing-end": "A message began before the previous message ended; the previous message was closed.",
    "missing-start": "A message began without its start marker; the marker was supplied.",
    "no-markup": "The output had no Harmony markup; it was read as visible text.",
    "not-a-tool": "The recipient is not a tool; the body was read as text on its channel.",
    "recipient-repeated": "A header named several recipients; the first recipient that is a tool was used.",
    "recipient-spelling": "A misspelt recipient was read as the only declared tool that it can mean.",
    "restored-stop": "The backend did not send the stop token that ended the message; the terminator was restored.",
    "stray-header-words": "Words without meaning in a header were ignored.",
    "stray-special": "A special token that is not valid at its position was dropped.",
    "trailing-stop": "A second terminator after a complete message was dropped.",
    "type-as-recipient": "A content type was in the position of a recipient; it was read as a content type.",
    "undecodable-header": "A header contained bytes that are not UTF-8; they were replaced.",
    "unfinished-call": "A tool call had neither a terminator nor complete arguments followed by `<|start|>`; it was "
    "not treated as a call.",
    "unknown-channel": "A header named an unknown channel; the message was read as visible text.",
}

# Recoveries from an unsuitable or missing answer.
OF_THE_ANSWER: Final[Mapping[str, str]] = {
    "analysis-only": "The model stopped after its reasoning, without an answer; an answer was opened and the model "
    "continued.",
    CODE_FENCE: "A code fence surrounded an answer that must be JSON; the fence was removed.",
    DANGLING_PREAMBLE: "The model ended its turn after a preamble, without a call or an answer. The first time, the "
    "model continued; the second time, an answer was opened.",
    REASONING_BUDGET: "The reasoning budget was used up; the model had to answer or to call a tool.",
    REGENERATED_ANSWER: "An answer did not have the required format; it was generated again.",
    REGENERATED_CALL: "A call had invalid arguments; it was generated again.",
    REPETITION: "The output repeated itself. Reasoning was closed, whitespace in JSON was removed, or the output was "
    "stopped.",
    TOOL_NOT_ALLOWED: "The model called a tool that the request does not allow; the call was not emitted.",
    UNDECLARED_TOOL: "The model called a tool that the request does not declare, and was informed of the declared "
    "tools. The second time, the call was emitted as text.",
    WRAPPED_INPUT: "A call to a tool that takes plain text had JSON around the text; the JSON was removed.",
}

# Recoveries from invalid calls to server tools.
OF_HOSTED_TOOLS: Final[Mapping[str, str]] = {
    "approval-void": "A call was approved, but its tool is no longer available. The call was not made, and the model "
    "was informed.",
    "bad-tool-arguments": "The arguments of a server tool call were invalid. The call was not made, and the model was "
    "informed.",
    "call-limit": "The limit of server tool calls was reached. The call was not made, and the model was informed.",
    "call-not-repeated": "It is unknown whether a server tool call was carried out; the call was not repeated.",
    "late-call": "The model called a server tool when no more calls were possible; the call was neither made nor "
    "emitted.",
    "repeated-call": "The model called a server tool again and again with the same arguments. The gateway did not run "
    "the call again, and informed the model.",
    "tool-deadline": "The time limit for server tools expired, and the model was informed.",
    "tool-left-out": "A server tool was unavailable or could not be declared to the model; the request continued "
    "without it.",
    "tools-ended": "No more server tools were run; an answer was opened and the model continued.",
    "unknown-tool": "The model called a server tool that does not exist; the model was informed of the available "
    "tools.",
}

# Recoveries from requests with content that the model cannot read.
OF_THE_REQUEST: Final[Mapping[str, str]] = {
    MEDIA_LEFT_OUT: "The history contained images or other media. Each was replaced by a line of text.",
}

RULES: Final[Mapping[str, str]] = {**PARSING_RULES, **OF_THE_ANSWER, **OF_HOSTED_TOOLS, **OF_THE_REQUEST}
