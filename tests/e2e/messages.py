"""The Messages API in end-to-end tests: requests from Chat fields, and the client's view."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.api.messages.folding import fold, named_events
from tests.e2e.gateway import Answer, Message

# Finish reason of Chat by stop reason. All others are `length`.
FINISHES = {"end_turn": "stop", "refusal": "stop", "stop_sequence": "stop", "tool_use": "tool_calls"}
# Token limit that no answer of the tests reaches.
LONG = 30_000
WORDS = {"auto": "auto", "required": "any", "none": "none"}


def of_chat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Translate fields of a Chat request to a Messages request; thinking is enabled."""
    body = {"max_tokens": LONG, "thinking": {"type": "adaptive"}, **fields}
    body.pop("stream_options", None)
    if "tools" in body:
        body["tools"] = [_tool(tool["function"]) for tool in body["tools"]]
    if (choice := body.get("tool_choice")) is not None:
        tool_choice = {"type": "tool", "name": choice["function"]["name"]} if isinstance(choice, dict) else None
        body["tool_choice"] = tool_choice or {"type": WORDS[choice]}
    if response_format := body.pop("response_format", None):
        body["output_config"] = {"format": {"type": "json_schema", "schema": response_format["json_schema"]["schema"]}}
    if (budget := body.pop("reasoning", None)) is not None:
        body["thinking"] = {"type": "enabled", "budget_tokens": budget["max_tokens"]}
    if (parallel := body.pop("parallel_tool_calls", None)) is not None:
        body["tool_choice"] = {"type": "auto", **body.get("tool_choice", {}), "disable_parallel_tool_use": not parallel}
    return body


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    more = {name: function[name] for name in ("description", "strict") if function.get(name) is not None}
    return {"name": function["name"], "input_schema": parameters, **more}


def message_in(answer: Answer) -> dict[str, Any]:
    """Return the whole message, from the body or from a stream."""
    assert answer.status == 200, answer.raw
    return answer.body if not answer.events else fold(named_events(answer.raw))


def arguments_in(answer: Answer) -> list[str]:
    """Return the arguments of every call, byte by byte as in the stream."""
    if not answer.events:
        return [compact(block["input"]) for block in answer.body["content"] if block["type"] == "tool_use"]
    pieces: dict[int, str] = {}
    for event in answer.events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            pieces[event["index"]] = ""
        elif event["type"] == "content_block_delta" and event["index"] in pieces:
            pieces[event["index"]] += event["delta"]["partial_json"]
    return list(pieces.values())


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def text_in(content: Sequence[Mapping[str, Any]]) -> str:
    return "".join(block["text"] for block in content if block["type"] == "text")


def message_of(answer: Answer) -> Message:
    """Return the client's view of an answer, in the terms of Chat."""
    message = message_in(answer)
    content = message["content"]
    names = [block["name"] for block in content if block["type"] == "tool_use"]
    thoughts = "".join(block["thinking"] for block in content if block["type"] == "thinking")
    usage = message["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return Message(
        text_in(content) or None,
        thoughts or None,
        list(zip(names, arguments_in(answer), strict=True)),
        FINISHES.get(message["stop_reason"], "length"),
        message["unisono"],
        {"prompt_tokens": prompt, "completion_tokens": usage["output_tokens"]},
    )
