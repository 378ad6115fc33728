"""Requests as the checks make them."""

from __future__ import annotations

from typing import Any

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Gets the current weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "City name"}},
        "required": ["location"],
    },
}
THINKING: dict[str, Any] = {"type": "adaptive"}


def asked(text: str, **fields: Any) -> dict[str, Any]:
    """Arguments for `create`, for the demo model unless `fields` name another; always the likeliest token."""
    messages = [{"role": "user", "content": text}]
    return {
        "model": "gpt-oss-demo",
        "max_tokens": 2000,
        "messages": messages,
        "extra_body": {"temperature": 0},
        **fields,
    }


def scene(name: str, **fields: Any) -> dict[str, Any]:
    """Arguments for `create` that make the scripted backend write the script of that name."""
    return asked(f"script: {name}", **{"model": "scripted", **fields})


def answered(client: Any, stream: bool, fields: dict[str, Any]) -> Any:
    """The message, whole or as the SDK's own helper folds a stream."""
    if not stream:
        return client.messages.create(**fields)
    with client.messages.stream(**fields) as streaming:
        for _ in streaming:
            pass
        return streaming.get_final_message()


def text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")
