"""Assembly of streamed chat chunks into complete messages, as an OpenAI client does it."""

from __future__ import annotations

from typing import Any


def fold(chunks: list[Any]) -> list[dict[str, Any]]:
    """Return the choices of a stream in the form of a complete response.

    Fields that no chunk contains are missing.
    """
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        if chunk == "[DONE]":
            continue
        for choice in chunk["choices"]:
            empty = {"index": choice["index"], "message": {}, "finish_reason": None}
            merged = choices.setdefault(choice["index"], empty)
            _add(merged["message"], choice["delta"])
            if choice["finish_reason"] is not None:
                assert merged["finish_reason"] is None, "two finish reasons"
                merged["finish_reason"] = choice["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for call in value:
                assert call["index"] <= len(calls), "an index was skipped"
                if call["index"] == len(calls):
                    calls.append({})
                _merge(calls[call["index"]], {key: inner for key, inner in call.items() if key != "index"})
        elif name == "function_call":
            _merge(message.setdefault("function_call", {}), value)
        elif name == "role":
            assert "role" not in message, "the role was sent twice"
            message["role"] = value
        else:
            message[name] = message.get(name, "") + value


def _merge(merged: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if isinstance(value, dict):
            _merge(merged.setdefault(key, {}), value)
        elif key in ("arguments", "input"):
            merged[key] = merged.get(key, "") + value
        else:
            assert key not in merged, f"{key} was sent twice"
            merged[key] = value
