"""Messages as the end-to-end tests ask them: requests written as Chat writes them, and what a client is left with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.api.messages.folding import fold, named_events
from tests.e2e.gateway import Answer, Message

FINISHES = {"end_turn": "stop", "refusal": "stop", "stop_sequence": "stop", "tool_use": "tool_calls"}
"""How Chat says that an answer ended, where it is not its length."""
LONG = 30_000
"""Tokens; more than any answer of the tests has."""
WORDS = {"auto": "auto", "required": "any", "none": "none"}


def of_chat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a Chat request as a Messages request has them; thoughts are shown."""
    told = {"max_tokens": LONG, "thinking": {"type": "adaptive"}, **fields}
    told.pop("stream_options", None)
    if "tools" in told:
        told["tools"] = [_tool(tool["function"]) for tool in told["tools"]]
    if (choice := told.get("tool_choice")) is not None:
        named = {"type": "tool", "name": choice["function"]["name"]} if isinstance(choice, dict) else None
        told["tool_choice"] = named or {"type": WORDS[choice]}
    if asked := told.pop("response_format", None):
        told["output_config"] = {"format": {"type": "json_schema", "schema": asked["json_schema"]["schema"]}}
    if (budget := told.pop("reasoning", None)) is not None:
        told["thinking"] = {"type": "enabled", "budget_tokens": budget["max_tokens"]}
    if (parallel := told.pop("parallel_tool_calls", None)) is not None:
        told["tool_choice"] = {"type": "auto", **told.get("tool_choice", {}), "disable_parallel_tool_use": not parallel}
    return told


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    more = {name: function[name] for name in ("description", "strict") if function.get(name) is not None}
    return {"name": function["name"], "input_schema": parameters, **more}


def message_in(answer: Answer) -> dict[str, Any]:
    """The whole message, from the body or from a stream."""
    assert answer.status == 200, answer.raw
    return answer.body if not answer.events else fold(named_events(answer.raw))


def arguments_in(answer: Answer) -> list[str]:
    """The arguments of every call, to the byte where a stream tells them."""
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
    """What a client ends up with, in Chat's words."""
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
