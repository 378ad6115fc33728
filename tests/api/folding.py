"""What an OpenAI client makes of a stream: the chunks folded back into the message they stand for."""

from __future__ import annotations

from typing import Any


def fold(chunks: list[Any]) -> list[dict[str, Any]]:
    """Choices of a streamed answer in the shape of a whole one; fields nobody sent are missing."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        if chunk == "[DONE]":
            continue
        for choice in chunk["choices"]:
            new = {"index": choice["index"], "message": {}, "finish_reason": None}
            known = choices.setdefault(choice["index"], new)
            _add(known["message"], choice["delta"])
            if choice["finish_reason"] is not None:
                assert known["finish_reason"] is None, "two finish reasons"
                known["finish_reason"] = choice["finish_reason"]
    return [choices[index] for index in sorted(choices)]


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for call in value:
                assert call["index"] <= len(calls), "an index was left out"
                if call["index"] == len(calls):
                    calls.append({})
                _merge(calls[call["index"]], {key: inner for key, inner in call.items() if key != "index"})
        elif name == "function_call":
            _merge(message.setdefault("function_call", {}), value)
        elif name == "role":
            assert "role" not in message, "the role came twice"
            message["role"] = value
        else:
            message[name] = message.get(name, "") + value


def _merge(known: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict):
            _merge(known.setdefault(key, {}), value)
        elif key in ("arguments", "input"):
            known[key] = known.get(key, "") + value
        else:
            assert key not in known, f"{key} came twice"
            known[key] = value
