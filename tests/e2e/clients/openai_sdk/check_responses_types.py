"""Golden events and items of the Responses API, validated against the SDK's types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import ResponseItem
from openai.types.responses.response_output_item import McpCall
from openai_sdk.responding import EVENT_TYPES, is_known
from pydantic import TypeAdapter

GOLDEN = Path(__file__).parents[3] / "golden" / "responses"


def load_lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (GOLDEN / name).read_text().splitlines()]


def without_call_errors(value: Any) -> Any:
    """Return a value without the errors of MCP calls, if the SDK declares them as strings.

    SDK versions before 3 do.
    """
    if isinstance(value, list):
        return [without_call_errors(element) for element in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "mcp_call" and ERRORS_ARE_STRINGS:
        value = value | {"error": None}
    return {name: without_call_errors(element) for name, element in value.items()}


ERRORS_ARE_STRINGS = McpCall.model_fields["error"].annotation == str | None
EVENTS = [event for event in without_call_errors(load_lines("events.jsonl")) if is_known(event)]


@pytest.mark.parametrize("event", EVENTS, ids=[f"{number}-{event['type']}" for number, event in enumerate(EVENTS)])
def test_an_event_matches_its_sdk_type(event: dict[str, Any]) -> None:
    parsed = EVENT_TYPES[event["type"]].model_validate(event)
    for name, value in event.items():
        assert getattr(parsed, name) is not None or value is None


@pytest.mark.parametrize("item", load_lines("items.jsonl"), ids=lambda item: item["type"])
def test_an_item_matches_its_sdk_type(item: dict[str, Any]) -> None:
    TypeAdapter(ResponseItem).validate_python(item)


def test_the_golden_events_have_many_types() -> None:
    assert len({event["type"] for event in EVENTS}) >= 20
