"""Requests to the Messages API, and the text of the answers."""

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


def message_request(text: str, **fields: Any) -> dict[str, Any]:
    """Return arguments for `create`; by default, the demo model at temperature 0."""
    messages = [{"role": "user", "content": text}]
    return {
        "model": "gpt-oss-demo",
        "max_tokens": 2000,
        "messages": messages,
        "extra_body": {"temperature": 0},
        **fields,
    }


def scripted_request(name: str, **fields: Any) -> dict[str, Any]:
    """Return arguments for `create` that select a script of the scripted backend."""
    return message_request(f"script: {name}", **{"model": "scripted", **fields})


def create_message(client: Any, stream: bool, fields: dict[str, Any]) -> Any:
    """Create a message; with `stream`, through the SDK's stream helper."""
    if not stream:
        return client.messages.create(**fields)
    with client.messages.stream(**fields) as streaming:
        for _ in streaming:
            pass
        return streaming.get_final_message()


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")
