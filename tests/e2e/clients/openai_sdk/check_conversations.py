"""Conversations: create, update and delete them, add and list items, create responses."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai_sdk.responding import WEATHER, call_in, folded, result_of, to_ask, to_play, watched

UNKNOWN_ID = "conv_" + "0" * 32


def texts(client: OpenAI, conversation: str) -> list[str]:
    """Return the texts of a conversation, oldest first."""
    items: Any = client.conversations.items.list(conversation, order="asc")
    return [part.text for item in items if item.type == "message" for part in item.content]


def user_message(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


def test_a_conversation_is_created_updated_and_deleted(scripted: OpenAI) -> None:
    conversation = scripted.conversations.create(metadata={"topic": "x"}, items=[user_message("one")])
    assert (conversation.object, conversation.metadata, conversation.id[:5]) == (
        "conversation",
        {"topic": "x"},
        "conv_",
    )
    assert scripted.conversations.retrieve(conversation.id) == conversation
    updated = scripted.conversations.update(conversation.id, metadata={"topic": "y"})
    assert (updated.id, updated.metadata) == (conversation.id, {"topic": "y"})
    assert scripted.conversations.retrieve(conversation.id) == updated
    deleted = scripted.conversations.delete(conversation.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (conversation.id, True, "conversation.deleted")
    for call in (
        lambda: scripted.conversations.retrieve(conversation.id),
        lambda: scripted.conversations.items.list(conversation.id),
        lambda: scripted.conversations.delete(conversation.id),
        lambda: scripted.responses.create(**to_play("an answer", conversation=conversation.id)),
    ):
        with pytest.raises(openai.NotFoundError) as raised:
            call()
        assert raised.value.code == "not_found"


def test_items_are_added_listed_and_deleted(scripted: OpenAI) -> None:
    conversation = scripted.conversations.create()
    assert list(scripted.conversations.items.list(conversation.id)) == []
    added = scripted.conversations.items.create(
        conversation.id, items=[user_message(f"number {number}") for number in range(5)]
    )
    assert (len(added.data), added.has_more) == (5, False)
    assert (added.first_id, added.last_id) == (added.data[0].id, added.data[-1].id)
    pages = scripted.conversations.items.list(conversation.id, limit=2, order="asc")
    assert [len(page.data) for page in pages.iter_pages()] == [2, 2, 1]
    assert [item.id for item in pages] == [item.id for item in added.data]
    assert [item.id for item in scripted.conversations.items.list(conversation.id)] == [
        item.id for item in added.data[::-1]
    ]

    second: Any = added.data[1]
    assert scripted.conversations.items.retrieve(second.id, conversation_id=conversation.id) == second
    assert scripted.conversations.items.delete(second.id, conversation_id=conversation.id).id == conversation.id
    with pytest.raises(openai.NotFoundError):
        scripted.conversations.items.retrieve(second.id, conversation_id=conversation.id)
    assert texts(scripted, conversation.id) == ["number 0", "number 2", "number 3", "number 4"]


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "stream"])
def test_responses_are_added_to_their_conversation(demo: OpenAI, stream: bool) -> None:
    conversation = demo.conversations.create(items=[user_message("Hello!")])

    def answer(new_input: Any, **fields: Any) -> Any:
        request = to_ask(new_input, conversation=conversation.id, tools=[WEATHER], **fields)
        if stream:
            return demo.responses.retrieve(folded(watched(demo, request))["id"])
        return demo.responses.create(**request)

    first = answer("What is the weather in Paris?")
    assert first.conversation.id == conversation.id
    call = call_in(first)
    second = answer([result_of(call)])
    assert second.output_text == "It is sunny in Paris with 18 degrees."
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 8
    listed: Any = list(demo.conversations.items.list(conversation.id, order="asc"))
    assert [item.type for item in listed] == [
        "message", "message", "reasoning", "function_call", "function_call_output", "reasoning", "message",
    ]  # fmt: skip
    assert [item.id for item in listed if item.type in ("reasoning", "function_call")] == [
        *(item.id for item in first.output), second.output[0].id,
    ]  # fmt: skip
    assert texts(demo, conversation.id) == ["Hello!", "What is the weather in Paris?", second.output_text]


def test_a_failed_response_adds_nothing_to_the_conversation(scripted: OpenAI) -> None:
    conversation = scripted.conversations.create(items=[user_message("one")])
    with pytest.raises(openai.InternalServerError):
        scripted.responses.create(**to_play("broken", conversation=conversation.id))
    assert texts(scripted, conversation.id) == ["one"]
    scripted.responses.create(**to_play("an answer", conversation={"id": conversation.id}))
    assert texts(scripted, conversation.id) == ["one", "script: an answer", "Here is the answer."]


def test_a_conversation_allows_one_response_at_a_time(scripted: OpenAI) -> None:
    conversation = scripted.conversations.create()
    with scripted.responses.create(**to_play("slow", conversation=conversation.id), stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.ConflictError) as raised:
            scripted.responses.create(**to_play("an answer", conversation=conversation.id))
        assert (raised.value.status_code, raised.value.param) == (409, "conversation")
        with pytest.raises(openai.ConflictError):
            scripted.conversations.items.create(conversation.id, items=[user_message("in between")])
    # The conversation is free once the client has disconnected; the SDK retries until then.
    retrying = scripted.with_options(max_retries=4)
    assert retrying.responses.create(**to_play("an answer", conversation=conversation.id)).status == "completed"
    assert texts(scripted, conversation.id) == ["script: an answer", "Here is the answer."]


# Case: (fields of the response, exception, param).
INVALID: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], str]] = {
    "an unknown conversation": ({"conversation": UNKNOWN_ID}, openai.NotFoundError, "conversation"),
    "a malformed id": ({"conversation": "conv_x"}, openai.NotFoundError, "conversation"),
    "a conversation and a previous response": (
        {"conversation": UNKNOWN_ID, "previous_response_id": "resp_" + "0" * 32},
        openai.BadRequestError,
        "previous_response_id",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_conversation_is_rejected(scripted: OpenAI, name: str) -> None:
    fields, exception, param = INVALID[name]
    with pytest.raises(exception) as raised:
        scripted.responses.create(**to_play("an answer", **fields))
    assert raised.value.param == param


def test_too_many_items_and_long_metadata_are_rejected(scripted: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.conversations.create(items=[user_message("x")] * 21)
    assert raised.value.param == "items"
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.conversations.create(metadata={"a": "x" * 600})
    assert (raised.value.param or "").startswith("metadata")


async def test_the_async_client_manages_a_conversation(async_scripted: AsyncOpenAI) -> None:
    conversation = await async_scripted.conversations.create(items=[user_message("one")])
    await async_scripted.responses.create(**to_play("an answer", conversation=conversation.id))
    kinds = [item.type async for item in async_scripted.conversations.items.list(conversation.id, limit=2)]
    assert kinds == ["message", "reasoning", "message", "message"]
    assert (await async_scripted.conversations.delete(conversation.id)).deleted
