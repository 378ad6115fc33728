"""Events and items of the Responses API, read with the SDK's own types: every field it asks for is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import ResponseItem
from openai.types.responses.response_output_item import McpCall
from openai_sdk.responding import EVENT_TYPES
from pydantic import TypeAdapter

GOLDEN = Path(__file__).parents[3] / "golden" / "responses"


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (GOLDEN / name).read_text().splitlines()]


def known(value: Any) -> Any:
    """Without the errors of MCP calls where the SDK takes them for strings, which it did before version 3."""
    if isinstance(value, list):
        return [known(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "mcp_call" and ERRORS_ARE_STRINGS:
        value = value | {"error": None}
    return {name: known(inner) for name, inner in value.items()}


ERRORS_ARE_STRINGS = McpCall.model_fields["error"].annotation == str | None
EVENTS = known(lines("events.jsonl"))


@pytest.mark.parametrize("event", EVENTS, ids=[f"{number}-{event['type']}" for number, event in enumerate(EVENTS)])
def test_an_event_is_what_the_sdk_knows(event: dict[str, Any]) -> None:
    read = EVENT_TYPES[event["type"]].model_validate(event)
    for name, value in event.items():
        assert getattr(read, name) is not None or value is None


@pytest.mark.parametrize("item", lines("items.jsonl"), ids=lambda item: item["type"])
def test_an_item_is_what_the_sdk_knows(item: dict[str, Any]) -> None:
    TypeAdapter(ResponseItem).validate_python(item)


def test_the_golden_events_are_of_many_types() -> None:
    assert len({event["type"] for event in EVENTS}) >= 20
