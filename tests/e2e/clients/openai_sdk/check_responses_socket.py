"""Responses over a WebSocket, and compaction of histories."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai_sdk.responding import EVENT_TYPES, WEATHER, call_in, folded, result_of, to_ask, to_play

ANSWER = "It is sunny in Paris with 18 degrees."


def receive_events(connection: Any) -> list[dict[str, Any]]:
    """Return the events of one response, each validated strictly."""
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in ("response.completed", "response.incomplete", "response.failed"):
        data = connection.recv_bytes()
        event = connection.parse_event(data).to_dict()
        EVENT_TYPES[event["type"]].model_validate_json(data, strict=True)
        events.append(event)
    return events


@pytest.mark.slow
def test_several_turns_use_one_connection(demo: OpenAI) -> None:
    with demo.responses.connect() as connection:
        connection.response.create(**to_ask("What is the weather in Paris?", tools=[WEATHER]))
        first = demo.responses.retrieve(folded(receive_events(connection))["id"])
        results = [result_of(call_in(first))]
        connection.response.create(**to_ask(results, previous_response_id=first.id, tools=[WEATHER]))
        second = folded(receive_events(connection))
    assert second["previous_response_id"] == first.id
    stored = demo.responses.with_raw_response.retrieve(second["id"])
    assert stored.http_response.json() == second
    assert stored.parse().output_text == ANSWER


def test_a_connection_survives_a_rejected_request(scripted: OpenAI) -> None:
    with scripted.responses.connect() as connection:
        connection.response.create(**to_play("an answer", previous_response_id="resp_" + "0" * 32))
        error: Any = connection.recv()
        assert (error.type, error.status) == ("error", 404)
        assert error.to_dict()["error"]["code"] == "previous_response_not_found"
        connection.response.create(**to_play("an answer", store=False))
        assert folded(receive_events(connection))["status"] == "completed"


async def test_the_async_client_streams_over_a_connection(async_scripted: AsyncOpenAI) -> None:
    async with async_scripted.responses.connect() as connection:
        await connection.response.create(**to_play("an answer"))
        async for event in connection:
            if event.type == "response.completed":
                assert event.response.output_text == "Here is the answer."
                break


def test_a_compacted_history_can_be_continued(scripted: OpenAI) -> None:
    first = scripted.responses.create(**to_play("an answer"))
    # Read as JSON: user messages precede the compaction item, and the SDK's type does not allow them.
    raw = scripted.responses.with_raw_response.compact(model="scripted", previous_response_id=first.id)
    compacted = raw.http_response.json()
    assert compacted["object"] == "response.compaction"
    *messages, compaction = compacted["output"]
    assert [(item["type"], item["role"]) for item in messages] == [("message", "user")]
    assert compaction["type"] == "compaction"
    assert compaction["encrypted_content"]
    input_items = [*compacted["output"], {"role": "user", "content": "script: an answer"}]
    assert scripted.responses.create(**to_ask(input_items, model="scripted")).output_text == "Here is the answer."


def test_compaction_requires_input(scripted: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.responses.compact(model="scripted")
    assert raised.value.param == "input"
