"""Chat requests, and readers of completions and streams."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Gets the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"location": {"type": "string", "description": "City name"}},
            "required": ["location"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
PARIS_QUESTION = "What is the weather in Paris?"


def chat_request(text: str, **fields: Any) -> dict[str, Any]:
    """Return arguments for `create`; by default, the demo model at temperature 0."""
    return {
        "model": "gpt-oss-demo",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        **fields,
    }


def scripted_request(name: str, **fields: Any) -> dict[str, Any]:
    """Return arguments for `create` that select a script of the scripted backend."""
    return chat_request(f"script: {name}", **{"model": "scripted", **fields})


def fold_chunks(chunks: Iterable[ChatCompletionChunk]) -> ChatCompletion:
    """Return the completion that the SDK accumulates from a stream.

    It equals the SDK's final completion, except for a truncated answer.
    """
    state: Any = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(chunk)
    completion: ChatCompletion = state.current_completion_snapshot
    return completion


def reasoning_of(message: Any) -> Any:
    """Return the reasoning of a message or delta; the SDK has it only as an extra field."""
    return (message.model_extra or {}).get("reasoning")


def unisono_fields(completion: Any) -> dict[str, Any]:
    """Return the gateway's own object on a completion or a chunk."""
    fields = (completion.model_extra or {})["unisono"]
    assert isinstance(fields, dict)
    return fields


def only_call(completion: Any) -> Any:
    """Return the only tool call of the only choice."""
    (choice,) = completion.choices
    (call,) = choice.message.tool_calls
    return call
