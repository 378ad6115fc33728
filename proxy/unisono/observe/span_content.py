"""Messages of a generation as JSON, in the format of OpenTelemetry's conventions.

Their size is limited: the oldest messages are omitted first, and long texts lose their middle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

import orjson

from unisono.core.conversation import (
    AddedTools,
    AssistantCall,
    AssistantMessage,
    AssistantReasoning,
    DeveloperMessage,
    Item,
    ToolResult,
    UserMessage,
)
from unisono.core.events import Closed, HostedCall, Reasoning, Text, ToolCall
from unisono.core.json_syntax import is_deeper
from unisono.core.observer import GenerationDone
from unisono.errors import well_formed

Part = dict[str, Any]
OMITTED: Final = " [...] "
# Maximum nesting depth of arguments that are written as JSON. orjson writes at most 254 levels.
MAX_LEVELS: Final = 200


def content_of(done: GenerationDone, max_bytes: int) -> Mapping[str, str]:
    """Return the attributes with the content of a generation; empty if content is not traced."""
    details = done.start.details
    if details is None or details.conversation is None:
        return {}
    conversation, longest = details.conversation, max_bytes // 2
    instructions = [_text(conversation.preamble.instructions, longest)] if conversation.preamble.instructions else []
    messages = [message for item in conversation.items if (message := _message(item, longest)) is not None]
    if conversation.prefill:
        messages.append({"role": "assistant", "parts": [_text(conversation.prefill, longest)]})
    closed = [event for event in (*done.output, done.cut_off) if isinstance(event, Closed)]
    parts = [part for event in closed if (part := _output_part(event, longest))]
    answer = [{"role": "assistant", "parts": parts, "finish_reason": done.finish or "error"}]
    found = {"gen_ai.input.messages": _fitting(messages, max_bytes), "gen_ai.output.messages": _json(answer)}
    return found | ({"gen_ai.system_instructions": _json(instructions)} if instructions else {})


def _message(item: Item, longest: int) -> Part | None:
    match item:
        case UserMessage():
            return {"role": "user", "parts": [_text(item.text, longest)]}
        case DeveloperMessage():
            return {"role": "system", "parts": [_text(item.text, longest)]}
        case AssistantReasoning():
            return {"role": "assistant", "parts": [_text(item.text, longest, "reasoning")]}
        case AssistantMessage():
            return {"role": "assistant", "parts": [_text(item.text, longest)]}
        case AssistantCall():
            return {"role": "assistant", "parts": [_call(item.call_id, item.name, item.arguments, longest)]}
        case ToolResult():
            result = {"type": "tool_call_response", "id": item.call_id, "response": _shortened(item.output, longest)}
            return {"role": "tool", "parts": [result]}
        case AddedTools():
            return None


def _output_part(event: Closed, longest: int) -> Part | None:
    match event.item:
        case Reasoning():
            return _text(event.text, longest, "reasoning")
        case Text():
            return _text(event.text, longest)
        case ToolCall() | HostedCall():
            return _call(event.item.call_id, event.item.name, event.text, longest)
        case _:
            return None


def _text(text: str, longest: int, kind: str = "text") -> Part:
    return {"type": kind, "content": _shortened(text, longest)}


def _call(call_id: str, name: str, arguments: str, longest: int) -> Part:
    value: Any = _shortened(arguments, longest)
    # Models may write arguments that are not valid JSON. Deeply nested JSON stays text.
    with suppress(orjson.JSONDecodeError):
        value = value if is_deeper(value, MAX_LEVELS) else orjson.loads(value)
    return {"type": "tool_call", "id": call_id, "name": name, "arguments": value}


def _shortened(text: str, longest: int) -> str:
    """Return the text without its middle if it has more than `longest` bytes."""
    text = well_formed(text)
    raw = text.encode()
    if len(raw) <= longest:
        return text
    half = max((longest - len(OMITTED)) // 2, 0)
    return raw[:half].decode(errors="ignore") + OMITTED + raw[len(raw) - half :].decode(errors="ignore")


def _fitting(messages: list[Part], max_bytes: int) -> str:
    """Return the latest messages that fit into `max_bytes` as JSON."""
    room, kept = max_bytes, len(messages)
    while kept and (room := room - len(orjson.dumps(messages[kept - 1])) - 1) >= 0:
        kept -= 1
    return _json(messages[kept:])


def _json(value: Iterable[Part]) -> str:
    return orjson.dumps(value).decode()
