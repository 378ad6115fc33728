"""Events and items of the Responses API, read with the SDK's own types: every field it asks for is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import ResponseItem
from openai_sdk.responding import EVENT_TYPES
from pydantic import TypeAdapter

GOLDEN = Path(__file__).parents[3] / "golden" / "responses"


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (GOLDEN / name).read_text().splitlines()]


EVENTS = lines("events.jsonl")


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
