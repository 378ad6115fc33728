"""Background responses: polled, streamed, resumed, continued, cancelled and deleted."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai_sdk.responding import ENDINGS, folded, to_play, watched, watched_again

# A sixth of the duration of the slow script.
MAX_WAIT_S = 5.0


def background_request(tokens: int | None = None, **fields: Any) -> dict[str, Any]:
    """Return arguments for a background response.

    It takes half a minute, unless `tokens` limits its length.
    """
    limit = {} if tokens is None else {"max_output_tokens": tokens}
    return to_play("slow", background=True, **limit, **fields)


def poll(client: OpenAI, response_id: str) -> list[Any]:
    """Poll a response until it has ended; return all polled states."""
    deadline = time.monotonic() + MAX_WAIT_S
    states = [client.responses.retrieve(response_id)]
    while states[-1].status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
        states.append(client.responses.retrieve(response_id))
    return states


def test_a_background_response_is_polled_to_its_end(scripted: OpenAI) -> None:
    created = scripted.responses.create(**background_request(40))
    assert (created.status, created.background, created.output) == ("queued", True, [])
    states = poll(scripted, created.id)
    assert {response.status for response in states} >= {"in_progress", "incomplete"}
    last = states[-1]
    assert last.incomplete_details.reason == "max_output_tokens"
    assert last.output_text.startswith(" word word")
    assert last.usage.output_tokens == 40


def test_a_background_response_is_streamed_while_it_runs(scripted: OpenAI) -> None:
    events = watched(scripted, background_request(40))
    assert [event["type"] for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert events[0]["response"]["status"] == "queued"
    response = folded(events)
    assert scripted.responses.with_raw_response.retrieve(response["id"]).http_response.json() == response
    assert watched_again(scripted, response["id"]) == events


@pytest.mark.parametrize("last_number", [0, 7])
def test_a_disconnected_stream_resumes_at_the_next_event(scripted: OpenAI, last_number: int) -> None:
    events = []
    with scripted.responses.create(**background_request(40), stream=True) as stream:
        for event in stream:
            events.append(event.to_dict())
            if event.sequence_number == last_number:
                break
    response_id = events[0]["response"]["id"]
    rest = watched_again(scripted, response_id, starting_after=last_number)
    assert rest[0]["sequence_number"] == last_number + 1
    response = folded([*events, *rest])
    assert response["status"] == "incomplete"
    assert response["usage"]["output_tokens"] == 40
    assert watched_again(scripted, response_id) == [*events, *rest]


def test_the_stream_helper_resumes_a_finished_response(scripted: OpenAI) -> None:
    created = scripted.responses.create(**to_play("an answer", background=True))
    poll(scripted, created.id)
    with scripted.responses.stream(response_id=created.id, starting_after=4) as stream:
        numbers = [event.sequence_number for event in stream]
        final = stream.get_final_response()
    assert numbers[0] == 5
    assert numbers == list(range(5, 5 + len(numbers)))
    assert final.output_text == "Here is the answer."


def test_several_clients_stream_one_response(scripted: OpenAI) -> None:
    created = scripted.responses.create(**background_request(40))
    with (
        scripted.responses.retrieve(created.id, stream=True) as stream,
        scripted.responses.retrieve(created.id, stream=True, starting_after=2) as later_stream,
    ):
        events, later_events = [event.to_dict() for event in stream], [event.to_dict() for event in later_stream]
    assert events[3:] == later_events
    assert folded(events)["id"] == created.id


def test_a_cancelled_response_ends_at_once(scripted: OpenAI) -> None:
    events: list[Any] = []
    with scripted.responses.create(**background_request(), stream=True) as stream:
        for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                started = time.monotonic()
                cancelled = scripted.responses.cancel(events[0].response.id)
                break
        events += list(stream)
    assert time.monotonic() - started < MAX_WAIT_S
    assert cancelled.status == "cancelled"
    assert events[-1].type in ENDINGS
    assert events[-1].response.status == "cancelled"
    stored = scripted.responses.retrieve(cancelled.id)
    assert stored.status == "cancelled"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == stored.output_text
    # A second cancellation succeeds and changes nothing.
    assert scripted.responses.cancel(stored.id).to_dict() == stored.to_dict()


def test_cancelling_a_finished_response_changes_nothing(scripted: OpenAI) -> None:
    created = scripted.responses.create(**to_play("an answer", background=True))
    last = poll(scripted, created.id)[-1]
    assert last.status == "completed"
    assert scripted.responses.cancel(created.id).to_dict() == last.to_dict()


def test_a_running_response_can_be_deleted(scripted: OpenAI) -> None:
    started = time.monotonic()
    events: list[Any] = []
    with scripted.responses.create(**background_request(model="one-at-a-time"), stream=True) as stream:
        first = next(iter(stream))
        assert first.type == "response.created"
        scripted.responses.delete(first.response.id)
        with pytest.raises(openai.APIError, match="deleted"):
            events.extend(stream)
    assert not [event for event in events if event.type in ENDINGS]
    with pytest.raises(openai.NotFoundError):
        scripted.responses.retrieve(first.response.id)
    # The only slot of the backend is free again.
    answer = scripted.responses.create(**to_play("an answer", model="one-at-a-time"))
    assert answer.output_text == "Here is the answer."
    assert time.monotonic() - started < MAX_WAIT_S


def test_a_running_response_cannot_be_continued(scripted: OpenAI) -> None:
    created = scripted.responses.create(**background_request())
    with pytest.raises(openai.ConflictError) as raised:
        scripted.responses.create(**to_play("an answer", previous_response_id=created.id))
    assert (raised.value.status_code, raised.value.param) == (409, "previous_response_id")
    scripted.responses.cancel(created.id)


def test_a_finished_background_response_can_be_continued(scripted: OpenAI) -> None:
    created = scripted.responses.create(**to_play("an answer", background=True))
    poll(scripted, created.id)
    continued = scripted.responses.create(**to_play("an answer", previous_response_id=created.id, background=True))
    last = poll(scripted, continued.id)[-1]
    assert (last.output_text, last.previous_response_id) == ("Here is the answer.", created.id)


def test_a_background_response_locks_its_conversation_until_its_end(scripted: OpenAI) -> None:
    conversation = scripted.conversations.create()
    created = scripted.responses.create(**background_request(40, conversation=conversation.id))
    with pytest.raises(openai.ConflictError):
        scripted.responses.create(**to_play("an answer", conversation=conversation.id))
    poll(scripted, created.id)
    # The SDK retries until the conversation is free.
    scripted.with_options(max_retries=4).responses.create(**to_play("an answer", conversation=conversation.id))
    kinds = [item.type for item in scripted.conversations.items.list(conversation.id, order="asc")]
    assert kinds == ["message", "reasoning", "message"] * 2


def test_a_failed_response_is_stored(scripted: OpenAI) -> None:
    created = scripted.responses.create(**to_play("a reset later", background=True))
    last = poll(scripted, created.id)[-1]
    assert (last.status, last.error.code) == ("failed", "server_error")
    assert "127.0.0.1" not in last.error.message
    assert [event["type"] for event in watched_again(scripted, created.id)][-2:] == ["error", "response.failed"]


# Case: (fields, param).
INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "background without storage": ({"background": True, "store": False}, "store"),
    "empty input": ({"background": True, "input": []}, "input"),
    "a value out of range": ({"background": True, "temperature": 9}, "temperature"),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_background_request_is_rejected(scripted: OpenAI, name: str) -> None:
    fields, param = INVALID[name]
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.responses.create(**{**to_play("an answer"), **fields})
    assert raised.value.param == param


def test_a_foreground_response_cannot_be_resumed_or_cancelled(scripted: OpenAI) -> None:
    created = scripted.responses.create(**to_play("an answer"))
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.responses.retrieve(created.id, stream=True)
    assert raised.value.param == "stream"
    with pytest.raises(openai.BadRequestError) as raised:
        scripted.responses.cancel(created.id)
    assert raised.value.param == "response_id"


async def test_the_async_client_streams_and_cancels_responses(async_scripted: AsyncOpenAI) -> None:
    created = await async_scripted.responses.create(**background_request(40))
    stream = await async_scripted.responses.retrieve(created.id, stream=True)
    events = [event.to_dict() async for event in stream]
    assert folded(events)["status"] == "incomplete"
    running = [await async_scripted.responses.create(**background_request()) for _ in range(4)]
    cancelled = await asyncio.gather(*(async_scripted.responses.cancel(response.id) for response in running))
    assert [response.status for response in cancelled] == ["cancelled"] * 4
