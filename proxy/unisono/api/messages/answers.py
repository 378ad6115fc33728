"""Models of the answers of the Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from unisono.api.answer_types import ABSENT, About, AnswerModel, Count, Object
from unisono.api.error_responses import FailureFormat
from unisono.core.error_texts import ANTHROPIC_PROMPT_TOO_LONG
from unisono.errors import ContextTooLong, UnisonoError

# Error bodies in Anthropic's format, by HTTP status.

# Error types by status. Other statuses are client errors below 500, and server errors from 500.
TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def to_type(status: int) -> str:
    return TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def to_body(error: UnisonoError, request_id: str) -> dict[str, Any]:
    """Return the error object, as used in a body and in a stream.

    The message names the field at fault. The details hold the code that all APIs of the gateway use.
    """
    error_object = {"type": to_type(error.status), "message": to_message(error), "details": {"error_code": error.code}}
    return {"type": "error", "error": error_object} | ({"request_id": request_id} if request_id else {})


def to_message(error: UnisonoError) -> str:
    """Return the error text. It names the field at fault, except in texts that clients match."""
    if isinstance(error, ContextTooLong) and 0 < error.limit <= error.tokens:
        # A prompt that fills the window exactly leaves no room for the first output token.
        maximum = min(error.limit, error.tokens - 1)
        return ANTHROPIC_PROMPT_TOO_LONG.template.format(tokens=error.tokens, limit=maximum)
    if error.param is not None and f"'{error.param}'" not in error.message:
        return f"{error.param}: {error.message}"
    return error.message


ANTHROPIC: Final = FailureFormat(to_body, b"event: error\ndata: %b\n\n", "request-id")


# Call ids in this API's spelling. The gateway has one id per call for all APIs.

OURS: Final = "call_"
CLIENTS: Final = "toolu_"
# Prefix of the id of a call that the gateway made itself.
SERVERS: Final = "srvtoolu_"
# Prefix of the id of a call on a server that the request names.
MCP_SERVERS: Final = "mcptoolu_"


def gateway_id(call_id: str, prefix: str = CLIENTS) -> str:
    return prefix + call_id.removeprefix(OURS)


def known_id(client_id: str) -> str:
    """Convert a client's call id to the gateway's."""
    for prefix in (CLIENTS, SERVERS, MCP_SERVERS):
        if client_id.startswith(prefix):
            return OURS + client_id.removeprefix(prefix)
    return client_id


class AnsweredText(AnswerModel):
    type: Literal["text"]
    text: str


class AnsweredThinking(AnswerModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredToolUse(AnswerModel):
    type: Literal["tool_use", "server_tool_use", "mcp_tool_use"]
    id: str
    name: str
    server_name: str = ABSENT
    input: Object


class AnsweredToolResult(AnswerModel):
    type: Annotated[str, Field(pattern="_tool_result$")]
    tool_use_id: str
    is_error: bool = ABSENT
    content: Any


class AnsweredCompaction(AnswerModel):
    type: Literal["compaction"]
    content: str | None
    encrypted_content: str | None


AnsweredBlock = AnsweredText | AnsweredThinking | AnsweredToolUse | AnsweredToolResult | AnsweredCompaction


class RefusalDetails(AnswerModel):
    type: Literal["refusal"]
    category: None
    explanation: str | None


class OutputDetails(AnswerModel):
    thinking_tokens: Count


class MessageUsage(AnswerModel):
    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: OutputDetails
    server_tool_use: Object = ABSENT
    iterations: list[Object] = ABSENT


class ClearedContext(AnswerModel):
    type: Literal["clear_tool_uses_20250919", "clear_thinking_20251015"]
    cleared_input_tokens: Count
    cleared_tool_uses: Count = ABSENT
    cleared_thinking_turns: Count = ABSENT


class AppliedEdits(AnswerModel):
    applied_edits: list[ClearedContext]


class Message(AnswerModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: Literal[
        "end_turn",
        "max_tokens",
        "stop_sequence",
        "tool_use",
        "pause_turn",
        "compaction",
        "refusal",
        "model_context_window_exceeded",
    ]
    stop_sequence: str | None
    stop_details: RefusalDetails | None
    usage: MessageUsage
    context_management: AppliedEdits = ABSENT
    unisono: About


class MessageEvent(AnswerModel):
    type: str
    message: Object = ABSENT
    index: Count = ABSENT
    content_block: AnsweredBlock = ABSENT
    delta: Object = ABSENT
    usage: Object = ABSENT
    context_management: AppliedEdits = ABSENT


class OriginalTokens(AnswerModel):
    original_input_tokens: Count


class MessageTokens(AnswerModel):
    input_tokens: Count
    context_management: OriginalTokens = ABSENT
