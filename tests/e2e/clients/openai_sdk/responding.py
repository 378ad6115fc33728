"""Helpers for the Responses API: requests, validated stream events, and folding of streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, get_args

from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Gets the current weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "City name"}},
        "required": ["location"],
        "additionalProperties": False,
    },
    "strict": True,
}
ECHO: dict[str, Any] = {"type": "custom", "name": "echo", "description": "Repeats."}
RESULT = "18 degrees, sunny"

EVENT_TYPES: dict[str, type[BaseModel]] = {
    get_args(model.model_fields["type"].annotation)[0]: model for model in get_args(get_args(ResponseStreamEvent)[0])
}
# Prefix of events that SDK versions before 3 do not declare.
SHELL_EVENTS = "response.shell_call_command."
BEGINNINGS = ("response.created", "response.queued", "response.in_progress")
ENDINGS = ("response.completed", "response.incomplete", "response.failed")

Event = dict[str, Any]


def to_ask(given: Any = None, **fields: Any) -> dict[str, Any]:
    """Return arguments for `responses.create`, with temperature 0.

    The model is the demo model unless `fields` name another one.
    """
    body = {} if given is None else {"input": given}
    return {"model": "gpt-oss-demo", "temperature": 0, **body, **fields}


def to_play(name: str, **fields: Any) -> dict[str, Any]:
    """Return arguments that make the scripted backend play the script of that name."""
    return to_ask(f"script: {name}", **{"model": "scripted", **fields})


def result_of(call: Any, output: str = RESULT) -> dict[str, Any]:
    """Return the input item with the output of a call."""
    return {"type": f"{call.type}_output", "call_id": call.call_id, "output": output}


def call_in(response: Response) -> Any:
    """Return the only call of a response."""
    (call,) = [item for item in response.output if item.type in ("function_call", "custom_tool_call")]
    return call


def thoughts_in(response: Response) -> str:
    """Return the reasoning text of a response."""
    parts = [part for item in response.output if item.type == "reasoning" for part in item.content or ()]
    return "".join(part.text for part in parts)


def about(response: Any) -> dict[str, Any]:
    """Return the gateway's own `unisono` object of a response."""
    info = (response.model_extra or {})["unisono"]
    assert isinstance(info, dict)
    return info


def watched(client: OpenAI, fields: Mapping[str, Any]) -> list[Event]:
    """Create a response and return the events of its stream."""
    with client.responses.with_streaming_response.create(**fields, stream=True) as raw:
        assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"
        return events_in(raw.iter_lines())


def watched_again(client: OpenAI, response_id: str, **query: Any) -> list[Event]:
    """Return the events of a stored response."""
    with client.responses.with_streaming_response.retrieve(response_id, stream=True, **query) as raw:
        return events_in(raw.iter_lines())


def events_in(lines: Iterable[str]) -> list[Event]:
    """Parse stream events and validate each strictly against its SDK type."""
    lines_with_data = [line for line in lines if line and not line.startswith(":")]
    assert lines_with_data.pop() == "data: [DONE]"
    names, data = lines_with_data[::2], lines_with_data[1::2]
    events = []
    for name, body in zip(names, data, strict=True):
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if is_known(event):
            EVENT_TYPES[event["type"]].model_validate_json(body.removeprefix("data: "), strict=True)
        events.append(event)
    return events


def is_known(event: Event) -> bool:
    """Return False for an event that older versions of the SDK do not declare."""
    return event["type"] in EVENT_TYPES or not event["type"].startswith(SHELL_EVENTS)


def folded(events: list[Event]) -> dict[str, Any]:
    """Fold a stream into its response object.

    Every partial event must agree with the corresponding final event.
    """
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    beginning = [event["type"] for event in events if event["type"] in BEGINNINGS]
    assert beginning in (["response.created", "response.in_progress"], list(BEGINNINGS))
    assert [event["type"] for event in events[: len(beginning)]] == beginning
    assert [event["type"] for event in events if event["type"] in ENDINGS] == [events[-1]["type"]]
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1

    items: list[dict[str, Any]] = []
    for event in events[len(beginning) : -1]:
        if event["type"] != "error":
            _grow(items, event)
    last: dict[str, Any] = events[-1]["response"]
    assert items == last["output"]
    assert f"response.{last['status']}" == events[-1]["type"]
    return last


def _grow(items: list[dict[str, Any]], event: Event) -> None:
    kind, index = event["type"].removeprefix("response."), event["output_index"]
    if kind == "output_item.added":
        assert index == len(items)
        items.append(deepcopy(event["item"]))
        return
    assert index == len(items) - 1
    item = items[index]
    assert event.get("item_id", item["id"]) == item["id"]
    if kind == "output_item.done":
        settled = ("status", "encrypted_content", *KNOWN_AT_LAST.get(item["type"], ()))
        assert without(event["item"], *settled) == without(item, *settled)
        items[index] = event["item"]
        return
    FOLDS[kind](item, event)


def without(item: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in names}


def _part_added(item: dict[str, Any], event: Event) -> None:
    assert event["content_index"] == len(item["content"])
    item["content"].append(dict(event["part"]))


def _part_done(item: dict[str, Any], event: Event) -> None:
    assert item["content"][event["content_index"]] == event["part"]


def _part_delta(item: dict[str, Any], event: Event) -> None:
    assert event["delta"]
    item["content"][event["content_index"]]["text"] += event["delta"]


def _part_text(item: dict[str, Any], event: Event) -> None:
    assert item["content"][event["content_index"]]["text"] == event["text"]


def _grows(field: str) -> Callable[[dict[str, Any], Event], None]:
    def grow(item: dict[str, Any], event: Event) -> None:
        assert event["delta"]
        item[field] += event["delta"]

    return grow


def _has_grown(field: str) -> Callable[[dict[str, Any], Event], None]:
    def check(item: dict[str, Any], event: Event) -> None:
        assert item[field] == event[field]

    return check


def _step(item: dict[str, Any], event: Event) -> None:
    """Check a progress event of a server tool: it is named after its item."""
    assert event["type"].split(".")[1] == item["type"]


def _annotation_added(item: dict[str, Any], event: Event) -> None:
    notes = item["content"][event["content_index"]]["annotations"]
    assert event["annotation_index"] == len(notes)
    notes.append(event["annotation"])


def _command_added(item: dict[str, Any], event: Event) -> None:
    assert event["command_index"] == len(item["action"]["commands"])
    item["action"]["commands"].append(event["command"])


def _command_delta(item: dict[str, Any], event: Event) -> None:
    item["action"]["commands"][event["command_index"]] += event["delta"]


def _command_done(item: dict[str, Any], event: Event) -> None:
    assert item["action"]["commands"][event["command_index"]] == event["command"]


# Fields of an item that its events do not contain before the item is done.
KNOWN_AT_LAST: dict[str, tuple[str, ...]] = {
    "mcp_list_tools": ("tools", "error"),
    "mcp_call": ("output", "error"),
    "web_search_call": ("action",),
    "code_interpreter_call": ("outputs",),
    "apply_patch_call": ("operation",),
}

# Change of an item, by type of event.
FOLDS: dict[str, Callable[[dict[str, Any], Event], None]] = {
    "content_part.added": _part_added,
    "content_part.done": _part_done,
    "output_text.delta": _part_delta,
    "output_text.done": _part_text,
    "reasoning_text.delta": _part_delta,
    "reasoning_text.done": _part_text,
    "function_call_arguments.delta": _grows("arguments"),
    "function_call_arguments.done": _has_grown("arguments"),
    "custom_tool_call_input.delta": _grows("input"),
    "custom_tool_call_input.done": _has_grown("input"),
    "mcp_call_arguments.delta": _grows("arguments"),
    "mcp_call_arguments.done": _has_grown("arguments"),
    "code_interpreter_call_code.delta": _grows("code"),
    "code_interpreter_call_code.done": _has_grown("code"),
    "output_text.annotation.added": _annotation_added,
    "shell_call_command.added": _command_added,
    "shell_call_command.delta": _command_delta,
    "shell_call_command.done": _command_done,
    **dict.fromkeys(
        (
            *("mcp_list_tools.in_progress", "mcp_list_tools.completed", "mcp_list_tools.failed"),
            *("mcp_call.in_progress", "mcp_call.completed", "mcp_call.failed"),
            *("web_search_call.in_progress", "web_search_call.searching", "web_search_call.completed"),
            *("code_interpreter_call.in_progress", "code_interpreter_call.interpreting"),
            *("code_interpreter_call.completed", "compaction.compacting"),
        ),
        _step,
    ),
}
