"""Responses that go on without their client: polled, listened to, left and found again, called off."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai_sdk.responding import ENDINGS, folded, to_play, watched, watched_again

SOON_S = 5.0
"""A sixth of what the slow script takes."""


def to_let_run(tokens: int | None = None, **fields: Any) -> dict[str, Any]:
    """A response in the background, which takes half a minute unless it may have only so many tokens."""
    limit = {} if tokens is None else {"max_output_tokens": tokens}
    return to_play("slow", background=True, **limit, **fields)


def polled(client: OpenAI, response_id: str) -> list[Any]:
    """The response as it was from time to time, until it was over."""
    until = time.monotonic() + SOON_S
    seen = [client.responses.retrieve(response_id)]
    while seen[-1].status in ("queued", "in_progress"):
        assert time.monotonic() < until
        time.sleep(0.05)
        seen.append(client.responses.retrieve(response_id))
    return seen


def test_it_is_polled_to_its_end(scripted: OpenAI) -> None:
    made = scripted.responses.create(**to_let_run(40))
    assert (made.status, made.background, made.output) == ("queued", True, [])
    seen = polled(scripted, made.id)
    assert {response.status for response in seen} >= {"in_progress", "incomplete"}
    last = seen[-1]
    assert last.incomplete_details.reason == "max_output_tokens"
    assert last.output_text.startswith(" word word")
    assert last.usage.output_tokens == 40


def test_it_is_listened_to_while_it_runs(scripted: OpenAI) -> None:
    events = watched(scripted, to_let_run(40))
    assert [event["type"] for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert events[0]["response"]["status"] == "queued"
    response = folded(events)
    assert scripted.responses.with_raw_response.retrieve(response["id"]).http_response.json() == response
    assert watched_again(scripted, response["id"]) == events


@pytest.mark.parametrize("left_at", [0, 7])
def test_a_listener_that_left_goes_on_where_it_was(scripted: OpenAI, left_at: int) -> None:
    heard = []
    with scripted.responses.create(**to_let_run(40), stream=True) as stream:
        for event in stream:
            heard.append(event.to_dict())
            if event.sequence_number == left_at:
                break
    response_id = heard[0]["response"]["id"]
    rest = watched_again(scripted, response_id, starting_after=left_at)
    assert rest[0]["sequence_number"] == left_at + 1
    response = folded([*heard, *rest])
    assert response["status"] == "incomplete"
    assert response["usage"]["output_tokens"] == 40
    assert watched_again(scripted, response_id) == [*heard, *rest]


def test_the_stream_helper_finds_it_again(scripted: OpenAI) -> None:
    made = scripted.responses.create(**to_play("an answer", background=True))
    polled(scripted, made.id)
    with scripted.responses.stream(response_id=made.id, starting_after=4) as stream:
        numbers = [event.sequence_number for event in stream]
        final = stream.get_final_response()
    assert numbers[0] == 5
    assert numbers == list(range(5, 5 + len(numbers)))
    assert final.output_text == "Here is the answer."


def test_many_listen_at_once(scripted: OpenAI) -> None:
    made = scripted.responses.create(**to_let_run(40))
    with (
        scripted.responses.retrieve(made.id, stream=True) as one,
        scripted.responses.retrieve(made.id, stream=True, starting_after=2) as other,
    ):
        heard, heard_later = [event.to_dict() for event in one], [event.to_dict() for event in other]
    assert heard[3:] == heard_later
    assert folded(heard)["id"] == made.id


def test_one_that_is_called_off_ends_at_once(scripted: OpenAI) -> None:
    heard: list[Any] = []
    with scripted.responses.create(**to_let_run(), stream=True) as stream:
        for event in stream:
            heard.append(event)
            if event.type == "response.output_text.delta":
                begun = time.monotonic()
                called_off = scripted.responses.cancel(heard[0].response.id)
                break
        heard += list(stream)
    assert time.monotonic() - begun < SOON_S
    assert called_off.status == "cancelled"
    assert heard[-1].type in ENDINGS
    assert heard[-1].response.status == "cancelled"
    kept = scripted.responses.retrieve(called_off.id)
    assert kept.status == "cancelled"
    assert "".join(event.delta for event in heard if event.type == "response.output_text.delta") == kept.output_text
    # Once more is no fault and changes nothing.
    assert scripted.responses.cancel(kept.id).to_dict() == kept.to_dict()


def test_one_that_is_over_cannot_be_called_off_any_more(scripted: OpenAI) -> None:
    made = scripted.responses.create(**to_play("an answer", background=True))
    last = polled(scripted, made.id)[-1]
    assert last.status == "completed"
    assert scripted.responses.cancel(made.id).to_dict() == last.to_dict()


def test_one_that_is_deleted_while_it_runs_is_gone(scripted: OpenAI) -> None:
    begun = time.monotonic()
    heard: list[Any] = []
    with scripted.responses.create(**to_let_run(model="one-at-a-time"), stream=True) as stream:
        first = next(iter(stream))
        assert first.type == "response.created"
        scripted.responses.delete(first.response.id)
        with pytest.raises(openai.APIError, match="deleted"):
            heard.extend(stream)
    assert not [event for event in heard if event.type in ENDINGS]
    with pytest.raises(openai.NotFoundError):
        scripted.responses.retrieve(first.response.id)
    # The backend, which has a place for one, is not kept busy by it.
    answer = scripted.responses.create(**to_play("an answer", model="one-at-a-time"))
    assert answer.output_text == "Here is the answer."
    assert time.monotonic() - begun < SOON_S


def test_what_still_goes_on_cannot_be_continued_yet(scripted: OpenAI) -> None:
    made = scripted.responses.create(**to_let_run())
    with pytest.raises(openai.ConflictError) as raised:
        scripted.responses.create(**to_play("an answer", previous_response_id=made.id))
    assert (raised.value.status_code, raised.value.param) == (409, "previous_response_id")
    scripted.responses.cancel(made.id)


def test_it_is_continued_when_it_is_over(scripted: OpenAI) -> None:
    made = scripted.responses.create(**to_play("an answer", background=True))
    polled(scripted, made.id)
    then = scripted.responses.create(**to_play("an answer", previous_response_id=made.id, background=True))
    last = polled(scripted, then.id)[-1]
    assert (last.output_text, last.previous_response_id) == ("Here is the answer.", made.id)


def test_its_conversation_is_held_until_it_is_over(scripted: OpenAI) -> None:
    conversation = scripted.conversations.create()
    made = scripted.responses.create(**to_let_run(40, conversation=conversation.id))
    with pytest.raises(openai.ConflictError):
        scripted.responses.create(**to_play("an answer", conversation=conversation.id))
    polled(scripted, made.id)
    # The SDK asks again where the place is not free yet.
    scripted.with_options(max_retries=4).responses.create(**to_play("an answer", conversation=conversation.id))
    kinds = [item.type for item in scripted.conversations.items.list(conversation.id, order="asc")]
    assert kinds == ["message", "reasoning", "message"] * 2


def test_a_failure_is_kept(scripted: OpenAI) -> None:
    made = scripted.responses.create(**to_play("a reset later", background=True))
    last = polled(scripted, made.id)[-1]
    assert (last.status, last.error.code) == ("failed", "server_error")
    assert "127.0.0.1" not in last.error.message
    assert [event["type"] for event in watched_again(scripted, made.id)][-2:] == ["error", "response.failed"]


# what is asked: (request, param)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "to run unseen and be forgotten": ({"background": True, "store": False}, "store"),
    "nothing": ({"background": True, "input": []}, "input"),
    "a value out of range": ({"background": True, "temperature": 9}, "temperature"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_at_once(scripted: OpenAI, name: str) -> None:
    fields, param = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.responses.create(**{**to_play("an answer"), **fields})
    assert raised.value.param == param


def test_only_what_runs_in_the_background_can_be_heard_again_or_called_off(scripted: OpenAI) -> None:
    made = scripted.responses.create(**to_play("an answer"))
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.responses.retrieve(made.id, stream=True)
    assert raised.value.param == "stream"
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.responses.cancel(made.id)
    assert raised.value.param == "response_id"


async def test_an_async_client(async_scripted: AsyncOpenAI) -> None:
    made = await async_scripted.responses.create(**to_let_run(40))
    stream = await async_scripted.responses.retrieve(made.id, stream=True)
    heard = [event.to_dict() async for event in stream]
    assert folded(heard)["status"] == "incomplete"
    endless = [await async_scripted.responses.create(**to_let_run()) for _ in range(4)]
    ended = await asyncio.gather(*(async_scripted.responses.cancel(each.id) for each in endless))
    assert [each.status for each in ended] == ["cancelled"] * 4
