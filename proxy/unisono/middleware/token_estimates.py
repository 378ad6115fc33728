"""Estimates of the number of tokens of a prompt that has not been rendered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from unisono.core.conversation import AddedTools, AssistantCall, Conversation, ToolResult
from unisono.engine.request import GenerationRequest

# Bytes of text per token, for estimates. Most text has more bytes per token, so an estimate is usually too high.
BYTES_PER_TOKEN: Final = 3
# Number of tokens that an estimate adds for the parts of a prompt that are not the client's text.
EXTRA_TOKENS: Final = 100


def estimated_tokens(request: GenerationRequest) -> int:
    """Estimate the number of tokens of the prompt of a request."""
    return estimated(request.conversation) if request.passthrough is None else EXTRA_TOKENS + request.passthrough.tokens


def estimated(conversation: Conversation) -> int:
    """Estimate the number of tokens of a prompt without rendering it; usually too high."""
    return EXTRA_TOKENS + sum(map(_byte_length, _texts(conversation))) // BYTES_PER_TOKEN


def _byte_length(text: str) -> int:
    # For ASCII text, the number of bytes is the length, so nothing has to be encoded.
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _texts(conversation: Conversation) -> Iterator[str]:
    preamble = conversation.preamble
    yield preamble.instructions
    for tool in conversation.tools:
        yield tool.name
        yield tool.description
        yield str(tool.parameters or "")
    if preamble.form is not None:
        yield str(preamble.form.schema or preamble.form.grammar or preamble.form.choices or "")
    for item in conversation.items:
        match item:
            case AssistantCall(name=name, arguments=arguments):
                yield name
                yield arguments
            case ToolResult(output=output):
                yield output
            case AddedTools():
                pass  # `conversation.tools` includes them
            case _:
                yield item.text
    yield conversation.prefill or ""
