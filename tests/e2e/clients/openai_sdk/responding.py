"""Responses as the checks ask for them, and their streams: judged event by event, and folded without the SDK's help."""

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
BEGINNINGS = ("response.created", "response.queued", "response.in_progress")
ENDINGS = ("response.completed", "response.incomplete", "response.failed")

Event = dict[str, Any]


def to_ask(given: Any = None, **fields: Any) -> dict[str, Any]:
    """Arguments for `responses.create`, for the demo model unless `fields` name another; always the likeliest token."""
    asked = {} if given is None else {"input": given}
    return {"model": "gpt-oss-demo", "temperature": 0, **asked, **fields}


def to_play(name: str, **fields: Any) -> dict[str, Any]:
    """Arguments that make the scripted backend write the script of that name."""
    return to_ask(f"script: {name}", **{"model": "scripted", **fields})


def result_of(call: Any, output: str = RESULT) -> dict[str, Any]:
    """The input item that answers a call."""
    return {"type": f"{call.type}_output", "call_id": call.call_id, "output": output}


def call_in(response: Response) -> Any:
    """The only call of an answer."""
    (call,) = [item for item in response.output if item.type in ("function_call", "custom_tool_call")]
    return call


def thoughts_in(response: Response) -> str:
    """The reasoning that is shown."""
    parts = [part for item in response.output if item.type == "reasoning" for part in item.content or ()]
    return "".join(part.text for part in parts)


def about(response: Any) -> dict[str, Any]:
    """How the answer came to be: the gateway's own object."""
    told = (response.model_extra or {})["unisono"]
    assert isinstance(told, dict)
    return told


def watched(client: OpenAI, fields: Mapping[str, Any]) -> list[Event]:
    """The events of a new response, as they came over the wire."""
    with client.responses.with_streaming_response.create(**fields, stream=True) as raw:
        assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"
        return events_in(raw.iter_lines())


def watched_again(client: OpenAI, response_id: str, **query: Any) -> list[Event]:
    """The events of a response that is kept."""
    with client.responses.with_streaming_response.retrieve(response_id, stream=True, **query) as raw:
        return events_in(raw.iter_lines())


def events_in(lines: Iterable[str]) -> list[Event]:
    """Events, each read strictly as the type the SDK has for it: no field is missing, or of another type."""
    said = [line for line in lines if line and not line.startswith(":")]
    assert said.pop() == "data: [DONE]"
    names, data = said[::2], said[1::2]
    events = []
    for name, body in zip(names, data, strict=True):
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT_TYPES[event["type"]].model_validate_json(body.removeprefix("data: "), strict=True)
        events.append(event)
    return events


def folded(events: list[Event]) -> dict[str, Any]:
    """The response object that a whole stream adds up to. What its events say piece by piece, and once more when a
    piece is done, must be what the last one says."""
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
    kind, place = event["type"].removeprefix("response."), event["output_index"]
    if kind == "output_item.added":
        assert place == len(items)
        items.append(deepcopy(event["item"]))
        return
    assert place == len(items) - 1
    item = items[place]
    assert event.get("item_id", item["id"]) == item["id"]
    if kind == "output_item.done":
        settled = ("status", "encrypted_content", *KNOWN_AT_LAST.get(item["type"], ()))
        assert without(event["item"], *settled) == without(item, *settled)
        items[place] = event["item"]
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
    """A step of what the gateway does itself: it is named after its item."""
    assert event["type"].split(".")[1] == item["type"]


def _noted(item: dict[str, Any], event: Event) -> None:
    notes = item["content"][event["content_index"]]["annotations"]
    assert event["annotation_index"] == len(notes)
    notes.append(event["annotation"])


KNOWN_AT_LAST: dict[str, tuple[str, ...]] = {
    "mcp_list_tools": ("tools", "error"),
    "mcp_call": ("output", "error"),
    "web_search_call": ("action",),
    "code_interpreter_call": ("outputs",),
}
"""What of an item its events do not tell before it is done."""

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
    "output_text.annotation.added": _noted,
    **dict.fromkeys(
        (
            *("mcp_list_tools.in_progress", "mcp_list_tools.completed", "mcp_list_tools.failed"),
            *("mcp_call.in_progress", "mcp_call.completed", "mcp_call.failed"),
            *("web_search_call.in_progress", "web_search_call.searching", "web_search_call.completed"),
            *("code_interpreter_call.in_progress", "code_interpreter_call.interpreting"),
            "code_interpreter_call.completed",
        ),
        _step,
    ),
}
"""What an event does to the item it is about."""
