"""The Responses WebSocket: request frames, response events, errors, limits, disconnects."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from tests.api.responses.folding import fold
from tests.api.responses.sockets import HELLO, SHORT_LIVED_PATH, scripted_gateway
from tests.api.scripted import Step, final, finished, reasoning
from unisono.core.conversation import UserMessage
from unisono.errors import BackendUnavailable

PATHS = ("/v1/responses", "/responses", "/open-responses/v1/responses", "/open-responses/responses")
# Takes a few milliseconds on an idle machine.
DISCONNECT_TIMEOUT_S = 1.0
STEER = {"type": "response.steer"}


def slow_answer(words: int) -> list[Step]:
    """Script of an answer that takes one millisecond per word."""
    opened, *deltas, closed = final(0, *["la "] * words)
    pieces: list[Step] = [step for delta in deltas for step in ([delta], 0.001)]
    return [[opened], *pieces, [closed, finished()]]


SLOW: list[Step] = [final(0, "Hel", "lo")[:2], 60.0]


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_is_answered_on_every_path(path: str) -> None:
    async with scripted_gateway() as gateway:
        ann = await gateway.connect(path)
        ann.send(input="Hi")
        folded = fold(await ann.response_events())
        assert folded.response["status"] == "completed"
        assert folded.output[0]["content"][0]["text"] == "Hello"
        assert gateway.service.turns[0].origin.tenant == "ann"
        assert not gateway.service.turns[0].answer.whole


@pytest.mark.parametrize("path", PATHS)
async def test_websocket_events_equal_those_of_an_http_stream(path: str) -> None:
    script = [[*reasoning(0, "Easy.")], [*final(1, "Hel", "lo"), finished()]]

    def without_ids(events: list[Any]) -> Any:
        """Replace the ids, which are new in every response."""
        text = orjson.dumps(events).decode()
        ids = {event["response"]["id"] for event in events if "response" in event}
        ids |= {event["item"]["id"] for event in events if "item" in event}
        for new_id in ids:
            text = text.replace(new_id, "an id")
        return orjson.loads(text)

    async with scripted_gateway(script) as gateway:
        ann = await gateway.connect(path)
        ann.send(input="Hi")
        streamed = (await gateway.post(path, {"model": "gpt-oss", "input": "Hi", "stream": True})).body
        lines = [line[6:] for line in streamed.split(b"\n") if line.startswith(b"data: ")]
        assert lines[-1] == b"[DONE]"
        assert without_ids(await ann.response_events()) == without_ids([orjson.loads(line) for line in lines[:-1]])
        assert await ann.is_silent()


async def test_responses_of_one_lane_run_sequentially() -> None:
    async with scripted_gateway() as gateway:
        ann = await gateway.connect()
        for text in "123":
            ann.send(input=text)
        for _ in range(3):
            assert fold(await ann.response_events()).response["status"] == "completed"
        assert [request.conversation.items[-1] for request in gateway.service.turns] == [
            UserMessage(text) for text in "123"
        ]


async def test_lanes_run_concurrently_and_their_events_carry_the_stream_id() -> None:
    barrier = asyncio.Barrier(2)
    script: list[Step] = [final(0, "Hel", "lo")[:2], barrier, [*final(0, "Hel", "lo")[2:], finished()]]
    async with scripted_gateway(script) as gateway:
        ann = await gateway.connect()
        ann.send(input="1", stream_id="a.b-1_")
        ann.send(input="2")
        events: list[Any] = []
        while sum(event["type"] == "response.completed" for event in events) < 2:
            events.append(await ann.next_event())
        named = [event for event in events if event.get("stream_id") == "a.b-1_"]
        unnamed = [event for event in events if "stream_id" not in event]
        assert len(named) + len(unnamed) == len(events)
        for lane_events in (named, unnamed):
            assert fold(lane_events).response["status"] == "completed"


async def test_at_most_16_responses_run_concurrently() -> None:
    async with scripted_gateway(SLOW) as gateway:
        ann = await gateway.connect()
        for number in range(20):
            ann.send(input="Hi", stream_id=f"{number}")
        while len(gateway.service.runs) < 16:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.03)
        assert len(gateway.service.runs) == 16
        ann.disconnect()
        await ann.wait_until_done()


DEEP = '{"type":"response.create","model":"gpt-oss","input":' + "[" * 100 + "]" * 100 + "}"
CREATE: dict[str, Any] = {"type": "response.create", "model": "gpt-oss", "input": "Hi"}

BAD_FRAMES: dict[str, tuple[str | bytes | dict[str, Any], int, str, str | None]] = {
    # case: (frame, expected status, expected code, expected param)
    "no JSON": ("hello", 400, "invalid_value", None),
    "an empty frame": ("", 400, "invalid_value", None),
    "truncated JSON": (orjson.dumps(CREATE).decode()[:-5], 400, "invalid_value", None),
    "a list": ("[]", 400, "invalid_value", None),
    "binary": (orjson.dumps(CREATE), 400, "invalid_value", None),
    "JSON too deep": (DEEP, 400, "invalid_value", "input.0"),
    "too many values": ('{"a":[' + "1," * 600_000 + "1]}", 400, "invalid_value", None),
    "an input of 600,000 spaces": ({**CREATE, "input": " " * 600_000}, 400, "invalid_value", "input"),
    "a lone surrogate": ('{"type":"response.create","model":"gpt-oss","input":"\\ud800"}', 400, "invalid_value", None),
    "no type": ({"model": "gpt-oss", "input": "Hi"}, 400, "invalid_value", "type"),
    "a type that is not text": ({"type": ["response.create"]}, 400, "invalid_value", "type"),
    "an unknown type": ({"type": "session.update"}, 400, "invalid_value", "type"),
    "no model": ({"type": "response.create", "input": "Hi"}, 400, "invalid_value", "model"),
    "an unknown model": ({**CREATE, "model": "gpt-7"}, 404, "model_not_found", "model"),
    "no input": ({"type": "response.create", "model": "gpt-oss"}, 400, "invalid_value", "input"),
    "a wrong field": ({**CREATE, "temperature": 9}, 400, "invalid_value", "temperature"),
    "a background response": ({**CREATE, "background": True}, 400, "unsupported_value", "background"),
    "a text for generate": ({**CREATE, "generate": "no"}, 400, "invalid_value", "generate"),
    "an empty stream_id": ({**CREATE, "stream_id": ""}, 400, "invalid_stream_id", "stream_id"),
    "a stream_id with a space": ({**CREATE, "stream_id": "a b"}, 400, "invalid_stream_id", "stream_id"),
    "a stream_id of 257 characters": ({**CREATE, "stream_id": "a" * 257}, 400, "invalid_stream_id", "stream_id"),
    "a stream_id that is a number": ({**CREATE, "stream_id": 1}, 400, "invalid_stream_id", "stream_id"),
    "an unknown previous response": (
        {**CREATE, "previous_response_id": "resp_" + "0" * 32},
        404,
        "previous_response_not_found",
        "previous_response_id",
    ),
    "a steer without a response": (
        {**STEER, "input": "x"},
        400,
        "invalid_value",
        "previous_response_id",
    ),
    "a steer without input": (
        {**STEER, "previous_response_id": "resp_1"},
        400,
        "invalid_value",
        "input",
    ),
}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("path", PATHS[1:3])
@pytest.mark.parametrize(("frame", "status", "code", "param"), BAD_FRAMES.values(), ids=BAD_FRAMES)
async def test_a_bad_frame_gets_an_error_and_the_connection_stays_usable(
    path: str, frame: str | bytes | dict[str, Any], status: int, code: str, param: str | None
) -> None:
    async with scripted_gateway() as gateway:
        ann = await gateway.connect(path)
        error = await ann.expect_error(text=orjson.dumps(frame).decode() if isinstance(frame, dict) else frame)
        assert set(error) == {"type", "status", "error"}
        assert error["status"] == status
        assert set(error["error"]) == {"type", "code", "message", "param"}
        assert (error["error"]["type"], error["error"]["code"]) == ("invalid_request_error", code)
        assert error["error"]["param"] == param
        assert error["error"]["message"]
        assert not gateway.service.runs
        assert (await ann.respond(input="Hi"))["status"] == "completed"


async def test_an_error_carries_the_stream_id_of_its_lane() -> None:
    async with scripted_gateway() as gateway:
        ann = await gateway.connect()
        assert (await ann.expect_error(input="Hi", stream_id="main", temperature=9))["stream_id"] == "main"
        assert (await ann.expect_error(input="Hi", stream_id="main", background=True))["stream_id"] == "main"


async def test_the_stream_field_does_not_change_the_events() -> None:
    async with scripted_gateway() as gateway:
        ann = await gateway.connect()
        for stream in (True, False, None):
            ann.send(input="Hi", stream=stream, background=False)
            events = await ann.response_events()
            assert events[0]["type"] == "response.created"
            assert "notes" not in events[-1]["response"]["unisono"]


async def test_the_next_request_succeeds_after_an_unavailable_backend() -> None:
    async with scripted_gateway([BackendUnavailable("nobody there")], HELLO) as gateway:
        ann = await gateway.connect()
        error = await ann.expect_error(input="Hi")
        assert error["status"] == 503
        assert error["error"]["code"] == "backend_unavailable"
        assert error["error"]["type"] == "server_error"
        assert (await ann.respond(input="Hi"))["status"] == "completed"


async def test_an_internal_error_reveals_no_details() -> None:
    async with scripted_gateway([RuntimeError("the key is 1234")], HELLO) as gateway:
        ann = await gateway.connect()
        error = await ann.expect_error(input="Hi")
        assert (error["status"], error["error"]["code"]) == (500, "internal_error")
        assert "1234" not in orjson.dumps(error).decode()
        assert (await ann.respond(input="Hi"))["status"] == "completed"


async def test_a_failure_during_a_response_ends_it_as_failed() -> None:
    async with scripted_gateway([final(0, "Hel", "lo")[:2], BackendUnavailable("gone")], HELLO) as gateway:
        ann = await gateway.connect()
        ann.send(input="Hi", store=False)
        events = await ann.response_events()
        error = events[-2]
        assert set(error) == {"type", "sequence_number", "error"}
        assert error["error"]["message"] == "gone"
        assert fold(events).response["status"] == "failed"
        failed = events[-1]["response"]["id"]
        assert (await ann.expect_error(input="Hi", previous_response_id=failed))["error"]["code"] == (
            "previous_response_not_found"
        )
        assert (await ann.respond(input="Hi"))["status"] == "completed"


async def test_a_failed_steer_returns_its_input() -> None:
    async with scripted_gateway(SLOW) as gateway:
        ann = await gateway.connect()
        ann.send(input="Hi")
        created = await ann.next_event()
        steer = {"previous_response_id": created["response"]["id"], "input": "No, the other one."}
        ann.send(text=orjson.dumps({**STEER, **steer}).decode())
        while (event := await ann.next_event())["type"] != "response.steer.failed":
            assert event["type"].startswith("response.")
        assert event["steer"] == steer
        assert event["error"]["code"] == "steering_not_supported"
        assert not gateway.service.runs[0].cancelled
        ann.disconnect()
        await ann.wait_until_done()


async def test_a_processed_notification_gets_no_reply() -> None:
    async with scripted_gateway() as gateway:
        ann = await gateway.connect()
        ann.send(text='{"type":"response.processed","response_id":"resp_1"}')
        assert await ann.is_silent()
        assert (await ann.respond(input="Hi"))["status"] == "completed"


# -- disconnects, slow clients, limits


@pytest.mark.parametrize("lanes", [1, 3])
async def test_a_disconnect_cancels_all_running_and_queued_requests(lanes: int) -> None:
    async with scripted_gateway(SLOW) as gateway:
        ann = await gateway.connect()
        for lane in range(lanes):
            ann.send(input="Hi", stream_id=f"{lane}")
            ann.send(input="Never asked", stream_id=f"{lane}")
        while len(gateway.service.runs) < lanes or not all(run.taken for run in gateway.service.runs):
            await asyncio.sleep(0.005)
        ann.disconnect()
        await ann.wait_until_done(DISCONNECT_TIMEOUT_S)
        assert len(gateway.service.runs) == lanes
        assert all(run.cancelled and run.closed for run in gateway.service.runs)


async def test_a_paused_client_pauses_its_response() -> None:
    async with scripted_gateway(slow_answer(200)) as gateway:
        ann = await gateway.connect(SHORT_LIVED_PATH)
        ann.send(input="Hi")
        events = [await ann.next_event()]
        ann.can_receive.clear()
        await asyncio.sleep(0.1)
        taken = gateway.service.runs[0].taken
        await asyncio.sleep(0.05)
        assert gateway.service.runs[0].taken == taken
        ann.can_receive.set()
        assert fold(events + await ann.response_events()).response["status"] == "completed"


async def test_a_client_that_never_receives_is_disconnected() -> None:
    async with scripted_gateway() as gateway:
        ann = await gateway.connect()
        ann.can_receive.clear()
        for _ in range(200):
            ann.send(text="no JSON")
        await ann.wait_until_done(2.0)


async def test_an_expired_connection_finishes_its_response_and_closes() -> None:
    slow: list[Step] = [final(0, "Hel", "lo")[:2], 0.8, [*final(0, "Hel", "lo")[2:], finished()]]
    async with scripted_gateway(slow, lifetime_s=0.3) as gateway:
        ann = await gateway.connect(SHORT_LIVED_PATH)
        ann.send(input="Hi")
        await ann.next_event()
        await asyncio.sleep(0.5)
        ann.send(input="Too late", stream_id="other")
        events: list[Any] = []
        while not events or events[-1]["type"] != "response.completed":
            events.append(await ann.next_event())
        [late_error] = [event for event in events if event["type"] == "error"]
        assert late_error["stream_id"] == "other"
        final_error = await ann.next_event()
        for error in (late_error, final_error):
            assert error["status"] == 400
            assert error["error"]["code"] == "websocket_connection_limit_reached"
        assert "stream_id" not in final_error
        assert await ann.close_code() == 1000
        await ann.wait_until_done()
        assert len(gateway.service.runs) == 1


async def test_an_idle_connection_closes_at_the_end_of_its_lifetime() -> None:
    async with scripted_gateway(lifetime_s=0.4) as gateway:
        ann = await gateway.connect(SHORT_LIVED_PATH)
        await asyncio.sleep(0.03)
        assert (await ann.respond(input="Hi"))["status"] == "completed"
        assert (await ann.next_event())["error"]["code"] == "websocket_connection_limit_reached"
        assert await ann.close_code() == 1000


async def test_a_connection_has_at_most_32_lanes() -> None:
    async with scripted_gateway() as gateway:
        ann = await gateway.connect()
        for number in range(32):
            assert (await ann.respond(input="Hi", stream_id=f"{number}"))["status"] == "completed"
        error = await ann.expect_error(input="Hi", stream_id="33rd")
        assert (error["status"], error["error"]["code"]) == (400, "websocket_stream_limit_reached")
        assert error["stream_id"] == "33rd"
        assert (await ann.respond(input="Hi", stream_id="0"))["status"] == "completed"
        assert (await ann.respond(input="Hi"))["status"] == "completed"


async def test_a_full_request_queue_refuses_further_requests() -> None:
    async with scripted_gateway(SLOW) as gateway:
        ann = await gateway.connect()
        for _ in range(64):
            ann.send(input="Hi")
        ann.send(input="One more")
        while (event := await ann.next_event())["type"] != "error":
            assert event["type"].startswith("response.")
        assert (event["status"], event["error"]["code"]) == (503, "backend_overloaded")
        ann.disconnect()
        await ann.wait_until_done()
        assert len(gateway.service.runs) <= 1
