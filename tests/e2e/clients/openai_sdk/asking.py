"""Requests as the checks make them, and streams folded by the SDK's own accumulator."""

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
ABOUT_PARIS = "What is the weather in Paris?"


def asked(text: str, **fields: Any) -> dict[str, Any]:
    """Arguments for `create`, for the demo model unless `fields` name another; always the likeliest token."""
    return {
        "model": "gpt-oss-demo",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        **fields,
    }


def scene(name: str, **fields: Any) -> dict[str, Any]:
    """Arguments for `create` that make the scripted backend write the script of that name."""
    return asked(f"script: {name}", **{"model": "scripted", **fields})


def folded(chunks: Iterable[ChatCompletionChunk]) -> ChatCompletion:
    """What the SDK makes of a stream. Its final completion would be the same, but for an answer that was cut."""
    state: Any = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(chunk)
    completion: ChatCompletion = state.current_completion_snapshot
    return completion


def reasoning(said: Any) -> Any:
    """The reasoning of a message or delta; it is in no type of the SDK and comes as an extra field."""
    return (said.model_extra or {}).get("reasoning")


def about(completion: Any) -> dict[str, Any]:
    """How the answer came to be: the gateway's own object on a completion or a chunk."""
    told = (completion.model_extra or {})["unisono"]
    assert isinstance(told, dict)
    return told


def call_of(completion: Any) -> Any:
    """The only tool call of the only choice."""
    (choice,) = completion.choices
    (call,) = choice.message.tool_calls
    return call
