"""Responses that are kept: fetched, listed, counted, continued and deleted."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai_sdk.responding import WEATHER, call_in, folded, result_of, to_ask, to_play, watched

NOWHERE = "resp_" + "0" * 32


def test_what_is_fetched_is_what_was_answered(demo: OpenAI) -> None:
    made = demo.responses.create(**to_ask("ping", metadata={"a": "b"}))
    kept = demo.responses.retrieve(made.id)
    assert kept.to_dict() == made.to_dict()


def test_what_is_deleted_is_gone(scripted: OpenAI) -> None:
    made = scripted.responses.create(**to_play("an answer"))
    raw = scripted.responses.with_raw_response.delete(made.id)
    assert raw.http_response.json() == {"id": made.id, "object": "response", "deleted": True}
    for act in (
        lambda: scripted.responses.retrieve(made.id),
        lambda: scripted.responses.delete(made.id),
        lambda: scripted.responses.cancel(made.id),
        lambda: scripted.responses.input_items.list(made.id),
    ):
        with pytest.raises(openai.NotFoundError) as raised:
            act()
        assert (raised.value.status_code, raised.value.code) == (404, "not_found")


@pytest.mark.parametrize("response_id", [NOWHERE, "resp_x", "x" * 3000, "resp_%00", "chatcmpl-1"], ids=lambda x: x[:9])
def test_a_response_that_never_was(scripted: OpenAI, response_id: str) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        scripted.responses.retrieve(response_id)
    assert (raised.value.code, raised.value.type) == ("not_found", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as raised:
        scripted.responses.create(**to_play("an answer", previous_response_id=response_id))
    assert (raised.value.code, raised.value.param) == ("previous_response_not_found", "previous_response_id")


def test_what_is_not_to_be_kept_is_not(scripted: OpenAI) -> None:
    made = scripted.responses.create(**to_play("an answer", store=False))
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        scripted.responses.retrieve(made.id)


def test_input_is_listed_in_pages(scripted: OpenAI) -> None:
    given = [{"role": "user", "content": f"number {number}"} for number in range(7)]
    made = scripted.responses.create(**to_ask([*given, *to_said("an answer")], model="scripted"))

    def texts(order: Any) -> list[Any]:
        pages: Any = scripted.responses.input_items.list(made.id, limit=3, order=order)
        assert [len(page.data) for page in pages.iter_pages()] == [3, 3, 2]
        return [item.content[0].text for item in pages if item.type == "message"]

    forth = [f"number {number}" for number in range(7)] + ["script: an answer"]
    assert texts("asc") == forth
    assert texts("desc") == forth[::-1]
    ids = [item.id for item in scripted.responses.input_items.list(made.id)]
    assert len(set(ids)) == len(ids) == 8
    behind = scripted.responses.input_items.list(made.id, order="desc", after=ids[5])
    assert [item.id for item in behind] == ids[6:]


def to_said(name: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"script: {name}"}]


def test_every_kind_of_item_is_listed_as_the_sdk_knows_it(scripted: OpenAI) -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"}
    custom = {"type": "custom_tool_call", "call_id": "call_2", "name": "echo", "input": "x"}
    given: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "Hello."},
        call,
        {"type": "function_call_output", "call_id": "call_1", "output": "fine"},
        custom,
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "y"},
        *to_said("an answer"),
    ]
    made = scripted.responses.create(**to_ask(given, model="scripted"))
    listed = scripted.responses.input_items.list(made.id, order="asc")
    kinds = [item.get("type", "message") for item in given]
    assert [item.type for item in listed] == kinds
    again = [item.to_dict() for item in listed]
    assert scripted.responses.create(**to_ask(again, model="scripted")).output_text == "Here is the answer."


def test_a_prompt_is_counted_as_it_is_billed(demo: OpenAI) -> None:
    asking = to_ask("What is the weather in Paris?", tools=[WEATHER], instructions="Be brief.")
    counting = {name: value for name, value in asking.items() if name != "temperature"}
    counted = demo.responses.input_tokens.count(**counting)
    assert counted.object == "response.input_tokens"
    made = demo.responses.create(**asking)
    assert made.usage is not None
    assert made.usage.input_tokens == counted.input_tokens

    more = {"input": [result_of(call_in(made))], "previous_response_id": made.id}
    longer = demo.responses.input_tokens.count(**{**counting, **more})
    continued = demo.responses.create(**{**asking, **more})
    assert continued.usage is not None
    assert continued.usage.input_tokens == longer.input_tokens > made.usage.total_tokens


def test_a_chain_of_answers(demo: OpenAI) -> None:
    first = demo.responses.create(**to_ask("ping"))
    second = demo.responses.create(**to_ask("Hello!", previous_response_id=first.id))
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.previous_response_id == first.id
    # Only its own input is listed: what came before is told by what it continues.
    (item,) = demo.responses.input_items.list(second.id)
    assert item.type == "message"
    third = folded(watched(demo, to_ask("ping", previous_response_id=second.id, max_output_tokens=8)))
    assert third["previous_response_id"] == second.id
    # Two answers may continue the same one.
    fork = demo.responses.create(**to_ask("Hello!", previous_response_id=first.id))
    assert (fork.output_text, fork.usage.input_tokens if fork.usage else 0) == (
        second.output_text, second.usage.input_tokens
    )  # fmt: skip

    demo.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as raised:
        demo.responses.create(**to_ask("ping", previous_response_id=second.id))
    assert raised.value.code == "previous_response_not_found"


def test_items_are_referred_to_by_name(scripted: OpenAI) -> None:
    made = scripted.responses.create(**to_play("an answer"))
    (given,) = scripted.responses.input_items.list(made.id)
    named = [{"type": "item_reference", "id": item_id} for item_id in (given.id, *(item.id for item in made.output))]
    again = scripted.responses.create(**to_ask([*named, *to_said("an answer")], model="scripted"))
    assert again.usage is not None
    assert made.usage is not None
    assert again.usage.input_tokens > made.usage.input_tokens
    with pytest.raises(openai.NotFoundError) as raised:
        scripted.responses.create(**to_ask([{"type": "item_reference", "id": "msg_none"}], model="scripted"))
    assert raised.value.param == "input.0.id"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_same_request_twice_is_one_response(scripted: OpenAI, stream: bool) -> None:
    key = {"Idempotency-Key": str(uuid.uuid4())}
    if stream:
        one, other = (folded(watched(scripted, to_play("an answer", extra_headers=key))) for _ in range(2))
        assert one == other
    else:
        first, second = (scripted.responses.create(**to_play("an answer", extra_headers=key)) for _ in range(2))
        assert first.to_dict() == second.to_dict()
    with pytest.raises(openai.ConflictError) as raised:
        scripted.responses.create(**to_play("two ends", extra_headers=key), stream=stream)
    assert (raised.value.status_code, raised.value.code) == (409, "idempotency_key_reused")


async def test_the_same_request_at_once_is_one_response(async_scripted: AsyncOpenAI) -> None:
    key = {"Idempotency-Key": str(uuid.uuid4())}
    asking = to_play("slow", max_output_tokens=30, extra_headers=key)
    answers = await asyncio.gather(*(async_scripted.responses.create(**asking) for _ in range(3)))
    assert len({answer.id for answer in answers}) == 1
    assert [answer.status for answer in answers] == ["incomplete"] * 3
