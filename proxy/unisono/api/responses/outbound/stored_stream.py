"""Event stream rebuilt from a finished response whose event log is gone.

It has fewer deltas than the original stream, but the same item life cycles and the same last events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from unisono.api.responses.items import FAILED, IN_PROGRESS, INCOMPLETE, Wire
from unisono.api.responses.outbound.dialects import OPENAI, Dialect
from unisono.api.responses.outbound.failures import error_fields
from unisono.api.responses.outbound.item_lifecycle import (
    ARGUMENTS,
    CODE,
    HOSTED,
    HOSTED_ARGUMENTS,
    INPUT,
    MCP_LIST,
    REASONING,
    REFUSAL,
    TEXT,
    ItemLifecycle,
)
from unisono.api.responses.outbound.reasoning_summary import delta_event, first_event, last_events
from unisono.api.responses.outbound.response import LAST_EVENTS, to_response
from unisono.api.responses.outbound.serializer import WireEvent
from unisono.core.state_store import Status, StoredResponse

PARTS: Mapping[str, ItemLifecycle] = {"output_text": TEXT, "refusal": REFUSAL, "reasoning_text": REASONING}
CALLS: Mapping[str, ItemLifecycle] = {
    "function_call": ARGUMENTS,
    "custom_tool_call": INPUT,
    "mcp_call": HOSTED_ARGUMENTS,
    "code_interpreter_call": CODE,
}
# Initial values of fields of server tool items that are set when the call or list has ended.
EMPTY: Mapping[str, Wire] = {
    "mcp_call": {"output": None, "error": None},
    "mcp_list_tools": {"tools": [], "error": None},
    "code_interpreter_call": {"outputs": None},
}
# Items without a status.
STATELESS = frozenset({"mcp_list_tools", "mcp_approval_request", "mcp_elicitation_request"})


def replay_events(response: StoredResponse, dialect: Dialect = OPENAI) -> list[WireEvent]:
    """Return the events of a finished response, from its record instead of its log."""
    in_progress = replace(response, status=Status.IN_PROGRESS, output=(), usage=None, error=None, notes={})
    events: list[Wire] = [
        {"type": name, "response": to_response(in_progress)} for name in ("response.created", "response.in_progress")
    ]
    for place, item in enumerate(response.output):
        events += _item_events(dict(item.wire), place)
    if response.error is not None:
        events.append({"type": "error", **error_fields(response)})
    events.append({"type": LAST_EVENTS[response.status], "response": to_response(response)})
    return [_numbered(event, number, dialect) for number, event in enumerate(events)]


def _item_events(item: Wire, place: int) -> Iterator[Wire]:
    where = {"output_index": place}
    bare = {key: value for key, value in item.items() if key != "encrypted_content"}
    if item["type"] not in STATELESS:
        bare["status"] = IN_PROGRESS
    bare |= EMPTY.get(item["type"], {})
    call = CALLS.get(item["type"])
    if call is not None:
        bare[call.full] = ""
    elif "content" in item:
        bare["content"] = []
    if "summary" in item:
        bare["summary"] = []
    yield {"type": "response.output_item.added", **where, "item": bare}
    at = {"item_id": item["id"], **where}
    hosted = {**HOSTED, MCP_LIST.type: MCP_LIST}.get(item["type"])
    if hosted is not None:
        yield {"type": f"response.{hosted.type}.in_progress", **at}
    if call is not None:
        yield from _text_events(call, at, item[call.full], {name: item[name] for name in call.copied})
    for step in hosted.made if hosted is not None else ():
        yield {"type": f"response.{item['type']}.{step}", **at}
    yield from _summary_events(at, item)
    for index, part in enumerate(item.get("content") or ()):
        lifecycle = PARTS[part["type"]]
        assert lifecycle.part is not None
        within = {**at, "content_index": index}
        yield {"type": "response.content_part.added", **within, "part": lifecycle.part("")}
        yield from _text_events(lifecycle, within, part[lifecycle.full], {}, part.get("annotations") or ())
        yield {"type": "response.content_part.done", **within, "part": part}
    if hosted is not None:
        has_succeeded = item.get("error") is None and item.get("status") not in (INCOMPLETE, FAILED)
        yield {"type": f"response.{hosted.type}.{'completed' if has_succeeded else hosted.failed}", **at}
    yield {"type": "response.output_item.done", **where, "item": item}


def _summary_events(at: Wire, item: Wire) -> Iterator[Wire]:
    for part in item.get("summary") or ():
        text = part["text"]
        for name, body in (first_event(at), delta_event(at, text), *last_events(at, text, item["status"])):
            yield {"type": name, **body}


def _text_events(
    lifecycle: ItemLifecycle, at: Wire, text: str, copied: Wire, annotations: Sequence[Mapping[str, Any]] = ()
) -> Iterator[Wire]:
    more: Mapping[str, Any] = lifecycle.more or {}
    if text:
        yield {"type": f"{lifecycle.event}.delta", **at, "delta": text, **more}
    for number, annotation in enumerate(annotations):
        index = {"annotation_index": number, "annotation": annotation}
        yield {"type": "response.output_text.annotation.added", **at, **index}
    yield {"type": f"{lifecycle.event}.done", **at, lifecycle.full: text, **more, **copied}


def _numbered(event: Wire, number: int, dialect: Dialect) -> WireEvent:
    translated = dialect.translated({"type": event["type"], "sequence_number": number, **event})
    return WireEvent(number, translated["type"], orjson.dumps(translated))
