"""Stored responses: retrieve, list input, count tokens, continue and delete."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai_sdk.responding import WEATHER, call_in, folded, result_of, to_ask, to_play, watched

UNKNOWN_ID = "resp_" + "0" * 32


@pytest.mark.slow
def test_a_retrieved_response_equals_the_original(demo: OpenAI) -> None:
    created = demo.responses.create(**to_ask("ping", metadata={"a": "b"}))
    stored = demo.responses.retrieve(created.id)
    assert stored.to_dict() == created.to_dict()


def test_a_deleted_response_is_not_found(scripted: OpenAI) -> None:
    created = scripted.responses.create(**to_play("an answer"))
    raw = scripted.responses.with_raw_response.delete(created.id)
    assert raw.http_response.json() == {"id": created.id, "object": "response", "deleted": True}
    for call in (
        lambda: scripted.responses.retrieve(created.id),
        lambda: scripted.responses.delete(created.id),
        lambda: scripted.responses.cancel(created.id),
        lambda: scripted.responses.input_items.list(created.id),
    ):
        with pytest.raises(openai.NotFoundError) as raised:
            call()
        assert (raised.value.status_code, raised.value.code) == (404, "not_found")


@pytest.mark.parametrize(
    "response_id", [UNKNOWN_ID, "resp_x", "x" * 3000, "resp_%00", "chatcmpl-1"], ids=lambda x: x[:9]
)
def test_an_unknown_response_is_not_found(scripted: OpenAI, response_id: str) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        scripted.responses.retrieve(response_id)
    assert (raised.value.code, raised.value.type) == ("not_found", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as raised:
        scripted.responses.create(**to_play("an answer", previous_response_id=response_id))
    assert (raised.value.code, raised.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_response_with_store_false_is_not_stored(scripted: OpenAI) -> None:
    created = scripted.responses.create(**to_play("an answer", store=False))
    assert created.store is False
    with pytest.raises(openai.NotFoundError):
        scripted.responses.retrieve(created.id)


def test_input_items_are_listed_in_pages(scripted: OpenAI) -> None:
    messages = [{"role": "user", "content": f"number {number}"} for number in range(7)]
    created = scripted.responses.create(**to_ask([*messages, *script_messages("an answer")], model="scripted"))

    def texts(order: Any) -> list[Any]:
        pages: Any = scripted.responses.input_items.list(created.id, limit=3, order=order)
        assert [len(page.data) for page in pages.iter_pages()] == [3, 3, 2]
        return [item.content[0].text for item in pages if item.type == "message"]

    expected = [f"number {number}" for number in range(7)] + ["script: an answer"]
    assert texts("asc") == expected
    assert texts("desc") == expected[::-1]
    ids = [item.id for item in scripted.responses.input_items.list(created.id)]
    assert len(set(ids)) == len(ids) == 8
    later_items = scripted.responses.input_items.list(created.id, order="desc", after=ids[5])
    assert [item.id for item in later_items] == ids[6:]


def script_messages(name: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"script: {name}"}]


def test_every_item_type_is_listed_and_accepted_again(scripted: OpenAI) -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"}
    custom = {"type": "custom_tool_call", "call_id": "call_2", "name": "echo", "input": "x"}
    input_items: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "Hello."},
        call,
        {"type": "function_call_output", "call_id": "call_1", "output": "fine"},
        custom,
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "y"},
        *script_messages("an answer"),
    ]
    created = scripted.responses.create(**to_ask(input_items, model="scripted"))
    listed = scripted.responses.input_items.list(created.id, order="asc")
    types = [item.get("type", "message") for item in input_items]
    assert [item.type for item in listed] == types
    listed_items = [item.to_dict() for item in listed]
    assert scripted.responses.create(**to_ask(listed_items, model="scripted")).output_text == "Here is the answer."


@pytest.mark.slow
def test_the_input_token_count_equals_the_usage(demo: OpenAI) -> None:
    request = to_ask("What is the weather in Paris?", tools=[WEATHER], instructions="Be brief.")
    count_request = {name: value for name, value in request.items() if name != "temperature"}
    counted = demo.responses.input_tokens.count(**count_request)
    assert counted.object == "response.input_tokens"
    created = demo.responses.create(**request)
    assert created.usage is not None
    assert created.usage.input_tokens == counted.input_tokens

    continuation = {"input": [result_of(call_in(created))], "previous_response_id": created.id}
    longer = demo.responses.input_tokens.count(**{**count_request, **continuation})
    continued = demo.responses.create(**{**request, **continuation})
    assert continued.usage is not None
    assert continued.usage.input_tokens == longer.input_tokens > created.usage.total_tokens


@pytest.mark.slow
def test_responses_form_a_chain_with_branches(demo: OpenAI) -> None:
    first = demo.responses.create(**to_ask("ping"))
    second = demo.responses.create(**to_ask("Hello!", previous_response_id=first.id))
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.previous_response_id == first.id
    # Only its own input is listed; earlier items belong to the previous response.
    (item,) = demo.responses.input_items.list(second.id)
    assert item.type == "message"
    third = folded(watched(demo, to_ask("ping", previous_response_id=second.id, max_output_tokens=8)))
    assert third["previous_response_id"] == second.id
    # Two responses may continue the same one.
    fork = demo.responses.create(**to_ask("Hello!", previous_response_id=first.id))
    assert (fork.output_text, fork.usage.input_tokens if fork.usage else 0) == (
        second.output_text, second.usage.input_tokens
    )  # fmt: skip

    demo.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as raised:
        demo.responses.create(**to_ask("ping", previous_response_id=second.id))
    assert raised.value.code == "previous_response_not_found"


def test_item_references_resolve_to_stored_items(scripted: OpenAI) -> None:
    first = scripted.responses.create(**to_play("an answer"))
    (input_item,) = scripted.responses.input_items.list(first.id)
    references = [
        {"type": "item_reference", "id": item_id} for item_id in (input_item.id, *(item.id for item in first.output))
    ]
    second = scripted.responses.create(**to_ask([*references, *script_messages("an answer")], model="scripted"))
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    with pytest.raises(openai.NotFoundError) as raised:
        scripted.responses.create(**to_ask([{"type": "item_reference", "id": "msg_none"}], model="scripted"))
    assert raised.value.param == "input.0.id"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_repeated_idempotency_key_returns_the_same_response(scripted: OpenAI, stream: bool) -> None:
    key = {"Idempotency-Key": str(uuid.uuid4())}
    if stream:
        first_response, second_response = (
            folded(watched(scripted, to_play("an answer", extra_headers=key))) for _ in range(2)
        )
        assert first_response == second_response
    else:
        first, second = (scripted.responses.create(**to_play("an answer", extra_headers=key)) for _ in range(2))
        assert first.to_dict() == second.to_dict()
    with pytest.raises(openai.ConflictError) as raised:
        scripted.responses.create(**to_play("two ends", extra_headers=key), stream=stream)
    assert (raised.value.status_code, raised.value.code) == (409, "idempotency_key_reused")


async def test_concurrent_requests_with_one_key_share_a_response(async_scripted: AsyncOpenAI) -> None:
    key = {"Idempotency-Key": str(uuid.uuid4())}
    request = to_play("slow", max_output_tokens=30, extra_headers=key)
    responses = await asyncio.gather(*(async_scripted.responses.create(**request) for _ in range(3)))
    assert len({response.id for response in responses}) == 1
    assert [response.status for response in responses] == ["incomplete"] * 3
