"""Conversations: made, changed, filled, listed and answered in."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai_sdk.responding import WEATHER, call_in, folded, result_of, to_ask, to_play, watched

NOWHERE = "conv_" + "0" * 32


def texts(client: OpenAI, conversation: str) -> list[str]:
    """What was said in a conversation, oldest first."""
    items: Any = client.conversations.items.list(conversation, order="asc")
    return [part.text for item in items if item.type == "message" for part in item.content]


def said(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


def test_the_life_of_a_conversation(scripted: OpenAI) -> None:
    made = scripted.conversations.create(metadata={"topic": "x"}, items=[said("one")])
    assert (made.object, made.metadata, made.id[:5]) == ("conversation", {"topic": "x"}, "conv_")
    assert scripted.conversations.retrieve(made.id) == made
    changed = scripted.conversations.update(made.id, metadata={"topic": "y"})
    assert (changed.id, changed.metadata) == (made.id, {"topic": "y"})
    assert scripted.conversations.retrieve(made.id) == changed
    gone = scripted.conversations.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "conversation.deleted")
    for act in (
        lambda: scripted.conversations.retrieve(made.id),
        lambda: scripted.conversations.items.list(made.id),
        lambda: scripted.conversations.delete(made.id),
        lambda: scripted.responses.create(**to_play("an answer", conversation=made.id)),
    ):
        with pytest.raises(openai.NotFoundError) as raised:
            act()
        assert raised.value.code == "not_found"


def test_items_are_added_listed_and_taken_out(scripted: OpenAI) -> None:
    made = scripted.conversations.create()
    assert list(scripted.conversations.items.list(made.id)) == []
    added = scripted.conversations.items.create(made.id, items=[said(f"number {number}") for number in range(5)])
    assert (len(added.data), added.has_more) == (5, False)
    assert (added.first_id, added.last_id) == (added.data[0].id, added.data[-1].id)
    pages = scripted.conversations.items.list(made.id, limit=2, order="asc")
    assert [len(page.data) for page in pages.iter_pages()] == [2, 2, 1]
    assert [item.id for item in pages] == [item.id for item in added.data]
    assert [item.id for item in scripted.conversations.items.list(made.id)] == [item.id for item in added.data[::-1]]

    second: Any = added.data[1]
    assert scripted.conversations.items.retrieve(second.id, conversation_id=made.id) == second
    assert scripted.conversations.items.delete(second.id, conversation_id=made.id).id == made.id
    with pytest.raises(openai.NotFoundError):
        scripted.conversations.items.retrieve(second.id, conversation_id=made.id)
    assert texts(scripted, made.id) == ["number 0", "number 2", "number 3", "number 4"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_answers_become_part_of_their_conversation(demo: OpenAI, stream: bool) -> None:
    made = demo.conversations.create(items=[said("Hello!")])

    def answer(given: Any, **fields: Any) -> Any:
        asking = to_ask(given, conversation=made.id, tools=[WEATHER], **fields)
        if stream:
            return demo.responses.retrieve(folded(watched(demo, asking))["id"])
        return demo.responses.create(**asking)

    first = answer("What is the weather in Paris?")
    assert first.conversation.id == made.id
    call = call_in(first)
    second = answer([result_of(call)])
    assert second.output_text == "It is sunny in Paris with 18 degrees."
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 8
    listed: Any = list(demo.conversations.items.list(made.id, order="asc"))
    assert [item.type for item in listed] == [
        "message", "message", "reasoning", "function_call", "function_call_output", "reasoning", "message",
    ]  # fmt: skip
    assert [item.id for item in listed if item.type in ("reasoning", "function_call")] == [
        *(item.id for item in first.output), second.output[0].id,
    ]  # fmt: skip
    assert texts(demo, made.id) == ["Hello!", "What is the weather in Paris?", second.output_text]


def test_an_answer_that_failed_leaves_no_trace(scripted: OpenAI) -> None:
    made = scripted.conversations.create(items=[said("one")])
    with pytest.raises(openai.InternalServerError):
        scripted.responses.create(**to_play("broken", conversation=made.id))
    assert texts(scripted, made.id) == ["one"]
    scripted.responses.create(**to_play("an answer", conversation={"id": made.id}))
    assert texts(scripted, made.id) == ["one", "script: an answer", "Here is the answer."]


def test_one_answer_at_a_time(scripted: OpenAI) -> None:
    made = scripted.conversations.create()
    with scripted.responses.create(**to_play("slow", conversation=made.id), stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.ConflictError) as raised:
            scripted.responses.create(**to_play("an answer", conversation=made.id))
        assert (raised.value.status_code, raised.value.param) == (409, "conversation")
        with pytest.raises(openai.ConflictError):
            scripted.conversations.items.create(made.id, items=[said("in between")])
    # Once its reader has left, the place is free; the SDK asks again until it is.
    patient = scripted.with_options(max_retries=4)
    assert patient.responses.create(**to_play("an answer", conversation=made.id)).status == "completed"
    assert texts(scripted, made.id) == ["script: an answer", "Here is the answer."]


# what is wrong: (fields of a response, class, param)
WRONG: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], str]] = {
    "a conversation that never was": ({"conversation": NOWHERE}, openai.NotFoundError, "conversation"),
    "an id of nothing": ({"conversation": "conv_x"}, openai.NotFoundError, "conversation"),
    "two pasts": (
        {"conversation": NOWHERE, "previous_response_id": "resp_" + "0" * 32},
        openai.BadRequestError,
        "previous_response_id",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_conversation_that_cannot_be(scripted: OpenAI, name: str) -> None:
    fields, kind, param = WRONG[name]
    with pytest.raises(kind) as raised:
        scripted.responses.create(**to_play("an answer", **fields))
    assert raised.value.param == param


def test_what_a_conversation_cannot_hold_is_named(scripted: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.conversations.create(items=[said("x")] * 21)
    assert raised.value.param == "items"
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.conversations.create(metadata={"a": "x" * 600})
    assert (raised.value.param or "").startswith("metadata")


async def test_an_async_client(async_scripted: AsyncOpenAI) -> None:
    made = await async_scripted.conversations.create(items=[said("one")])
    await async_scripted.responses.create(**to_play("an answer", conversation=made.id))
    kinds = [item.type async for item in async_scripted.conversations.items.list(made.id, limit=2)]
    assert kinds == ["message", "reasoning", "message", "message"]
    assert (await async_scripted.conversations.delete(made.id)).deleted
