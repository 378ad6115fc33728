"""Responses over one WebSocket, and histories made shorter: what else the SDK has to ask with."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai_sdk.responding import EVENT_TYPES, WEATHER, call_in, folded, result_of, to_ask, to_play

ANSWER = "It is sunny in Paris with 18 degrees."


def heard(connection: Any) -> list[dict[str, Any]]:
    """The events of one answer, each read strictly."""
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in ("response.completed", "response.incomplete", "response.failed"):
        data = connection.recv_bytes()
        event = connection.parse_event(data).to_dict()
        EVENT_TYPES[event["type"]].model_validate_json(data, strict=True)
        events.append(event)
    return events


def test_turns_on_one_connection(demo: OpenAI) -> None:
    with demo.responses.connect() as connection:
        connection.response.create(**to_ask("What is the weather in Paris?", tools=[WEATHER]))
        first = demo.responses.retrieve(folded(heard(connection))["id"])
        then = [result_of(call_in(first))]
        connection.response.create(**to_ask(then, previous_response_id=first.id, tools=[WEATHER]))
        second = folded(heard(connection))
    assert second["previous_response_id"] == first.id
    kept = demo.responses.with_raw_response.retrieve(second["id"])
    assert kept.http_response.json() == second
    assert kept.parse().output_text == ANSWER


def test_a_connection_outlives_what_it_refuses(scripted: OpenAI) -> None:
    with scripted.responses.connect() as connection:
        connection.response.create(**to_play("an answer", previous_response_id="resp_" + "0" * 32))
        refused: Any = connection.recv()
        assert (refused.type, refused.status) == ("error", 404)
        assert refused.to_dict()["error"]["code"] == "previous_response_not_found"
        connection.response.create(**to_play("an answer", store=False))
        assert folded(heard(connection))["status"] == "completed"


async def test_an_async_connection(async_scripted: AsyncOpenAI) -> None:
    async with async_scripted.responses.connect() as connection:
        await connection.response.create(**to_play("an answer"))
        async for event in connection:
            if event.type == "response.completed":
                assert event.response.output_text == "Here is the answer."
                break


def test_a_history_is_made_shorter_and_goes_on(scripted: OpenAI) -> None:
    first = scripted.responses.create(**to_play("an answer"))
    # Read as it came: messages of users stand before the compaction, and the SDK's type for it knows none.
    raw = scripted.responses.with_raw_response.compact(model="scripted", previous_response_id=first.id)
    compacted = raw.http_response.json()
    assert compacted["object"] == "response.compaction"
    *said, compaction = compacted["output"]
    assert [(item["type"], item["role"]) for item in said] == [("message", "user")]
    assert compaction["type"] == "compaction"
    assert compaction["encrypted_content"]
    then = [*compacted["output"], {"role": "user", "content": "script: an answer"}]
    assert scripted.responses.create(**to_ask(then, model="scripted")).output_text == "Here is the answer."


def test_nothing_cannot_be_made_shorter(scripted: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.responses.compact(model="scripted")
    assert raised.value.param == "input"
