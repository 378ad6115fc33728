"""The Responses WebSocket: requests as frames, answers as the events of a stream, errors that end nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from tests.api.responses.folding import fold
from tests.api.responses.sockets import HELLO, SHORT, site
from tests.api.scripted import Step, final, finished, reasoning
from unisono.core.conversation import UserMessage
from unisono.errors import BackendUnavailable

PATHS = ("/v1/responses", "/responses", "/open-responses/v1/responses", "/open-responses/responses")
AT_ONCE_S = 1.0
"""A few milliseconds, on a machine that is not busy."""
STEER = {"type": "response.steer"}


def drop_by_drop(words: int) -> list[Step]:
    """An answer that takes a millisecond for every word."""
    opened, *deltas, closed = final(0, *["la "] * words)
    pieces: list[Step] = [step for delta in deltas for step in ([delta], 0.001)]
    return [[opened], *pieces, [closed, finished()]]


SLOW: list[Step] = [final(0, "Hel", "lo")[:2], 60.0]


@pytest.mark.parametrize("path", PATHS)
async def test_a_response_is_answered_on_every_path(path: str) -> None:
    async with site() as there:
        ann = await there.connect(path)
        ann.send(input="Hi")
        folded = fold(await ann.answer())
        assert folded.response["status"] == "completed"
        assert folded.output[0]["content"][0]["text"] == "Hello"
        assert there.turns.turns[0].tenant == "ann"
        assert not there.turns.turns[0].whole


@pytest.mark.parametrize("path", PATHS)
async def test_the_events_are_those_of_a_stream(path: str) -> None:
    script = [[*reasoning(0, "Easy.")], [*final(1, "Hel", "lo"), finished()]]

    def bare(events: list[Any]) -> Any:
        """Without what is new in every response."""
        text = orjson.dumps(events).decode()
        ids = {event["response"]["id"] for event in events if "response" in event}
        ids |= {event["item"]["id"] for event in events if "item" in event}
        for found in ids:
            text = text.replace(found, "an id")
        return orjson.loads(text)

    async with site(script) as there:
        ann = await there.connect(path)
        ann.send(input="Hi")
        streamed = (await there.post(path, {"model": "gpt-oss", "input": "Hi", "stream": True})).body
        lines = [line[6:] for line in streamed.split(b"\n") if line.startswith(b"data: ")]
        assert lines[-1] == b"[DONE]"
        assert bare(await ann.answer()) == bare([orjson.loads(line) for line in lines[:-1]])
        assert await ann.quiet()


async def test_responses_of_one_lane_come_one_after_the_other() -> None:
    async with site() as there:
        ann = await there.connect()
        for text in "123":
            ann.send(input=text)
        for _ in range(3):
            assert fold(await ann.answer()).response["status"] == "completed"
        assert [turn.conversation.items[-1] for turn in there.turns.turns] == [UserMessage(text) for text in "123"]


async def test_lanes_go_side_by_side_and_their_events_say_which() -> None:
    together = asyncio.Barrier(2)
    script: list[Step] = [final(0, "Hel", "lo")[:2], together, [*final(0, "Hel", "lo")[2:], finished()]]
    async with site(script) as there:
        ann = await there.connect()
        ann.send(input="1", stream_id="a.b-1_")
        ann.send(input="2")
        events: list[Any] = []
        while sum(event["type"] == "response.completed" for event in events) < 2:
            events.append(await ann.event())
        named = [event for event in events if event.get("stream_id") == "a.b-1_"]
        nameless = [event for event in events if "stream_id" not in event]
        assert len(named) + len(nameless) == len(events)
        for each in (named, nameless):
            assert fold(each).response["status"] == "completed"


async def test_only_so_many_responses_are_made_at_once() -> None:
    async with site(SLOW) as there:
        ann = await there.connect()
        for number in range(20):
            ann.send(input="Hi", stream_id=f"{number}")
        while len(there.turns.runs) < 16:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.03)
        assert len(there.turns.runs) == 16
        ann.leave()
        await ann.ended()


DEEP = '{"type":"response.create","model":"gpt-oss","input":' + "[" * 100 + "]" * 100 + "}"
CREATE: dict[str, Any] = {"type": "response.create", "model": "gpt-oss", "input": "Hi"}

BAD: dict[str, tuple[str | bytes | dict[str, Any], int, str, str | None]] = {
    # a frame: (what it holds, the status, the code, the field named)
    "no JSON": ("hello", 400, "invalid_value", None),
    "nothing": ("", 400, "invalid_value", None),
    "half": (orjson.dumps(CREATE).decode()[:-5], 400, "invalid_value", None),
    "a list": ("[]", 400, "invalid_value", None),
    "binary": (orjson.dumps(CREATE), 400, "invalid_value", None),
    "too deep": (DEEP, 400, "invalid_value", None),
    "too many values": ('{"a":[' + "1," * 600_000 + "1]}", 400, "invalid_value", None),
    "one endless word": ({**CREATE, "input": " " * 600_000}, 400, "invalid_value", "input"),
    "a lone surrogate": ('{"type":"response.create","model":"gpt-oss","input":"\\ud800"}', 400, "invalid_value", None),
    "no type": ({"model": "gpt-oss", "input": "Hi"}, 400, "invalid_value", "type"),
    "a type that is no text": ({"type": ["response.create"]}, 400, "invalid_value", "type"),
    "an unknown type": ({"type": "session.update"}, 400, "invalid_value", "type"),
    "no model": ({"type": "response.create", "input": "Hi"}, 400, "invalid_value", "model"),
    "an unknown model": ({**CREATE, "model": "gpt-7"}, 404, "model_not_found", "model"),
    "no input": ({"type": "response.create", "model": "gpt-oss"}, 400, "invalid_value", "input"),
    "a wrong field": ({**CREATE, "temperature": 9}, 400, "invalid_value", "temperature"),
    "in the background": ({**CREATE, "background": True}, 400, "unsupported_value", "background"),
    "generate a word": ({**CREATE, "generate": "no"}, 400, "invalid_value", "generate"),
    "an empty stream": ({**CREATE, "stream_id": ""}, 400, "invalid_stream_id", "stream_id"),
    "a stream with a space": ({**CREATE, "stream_id": "a b"}, 400, "invalid_stream_id", "stream_id"),
    "a stream of 257": ({**CREATE, "stream_id": "a" * 257}, 400, "invalid_stream_id", "stream_id"),
    "a stream that is a number": ({**CREATE, "stream_id": 1}, 400, "invalid_stream_id", "stream_id"),
    "a response nobody knows": (
        {**CREATE, "previous_response_id": "resp_" + "0" * 32},
        404,
        "previous_response_not_found",
        "previous_response_id",
    ),
    "steering without a response": (
        {**STEER, "input": "x"},
        400,
        "invalid_value",
        "previous_response_id",
    ),
    "steering without input": (
        {**STEER, "previous_response_id": "resp_1"},
        400,
        "invalid_value",
        "input",
    ),
}


@pytest.mark.parametrize("path", PATHS[1:3])
@pytest.mark.parametrize(("frame", "status", "code", "param"), BAD.values(), ids=BAD)
async def test_a_bad_frame_is_an_error_and_nothing_more(
    path: str, frame: str | bytes | dict[str, Any], status: int, code: str, param: str | None
) -> None:
    async with site() as there:
        ann = await there.connect(path)
        error = await ann.refused(text=orjson.dumps(frame).decode() if isinstance(frame, dict) else frame)
        assert set(error) == {"type", "status", "error"}
        assert error["status"] == status
        assert set(error["error"]) == {"type", "code", "message", "param"}
        assert (error["error"]["type"], error["error"]["code"]) == ("invalid_request_error", code)
        assert error["error"]["param"] == param
        assert error["error"]["message"]
        assert not there.turns.runs
        assert (await ann.asked(input="Hi"))["status"] == "completed"


async def test_an_error_says_which_lane_it_is_of() -> None:
    async with site() as there:
        ann = await there.connect()
        assert (await ann.refused(input="Hi", stream_id="main", temperature=9))["stream_id"] == "main"
        assert (await ann.refused(input="Hi", stream_id="main", background=True))["stream_id"] == "main"


async def test_what_asks_for_a_stream_or_for_none_gets_events() -> None:
    async with site() as there:
        ann = await there.connect()
        for stream in (True, False, None):
            ann.send(input="Hi", stream=stream, background=False)
            events = await ann.answer()
            assert events[0]["type"] == "response.created"
            assert "notes" not in events[-1]["response"]["unisono"]


async def test_a_backend_that_is_away_is_an_error_and_the_next_request_goes_on() -> None:
    async with site([BackendUnavailable("nobody there")], HELLO) as there:
        ann = await there.connect()
        error = await ann.refused(input="Hi")
        assert error["status"] == 503
        assert error["error"]["code"] == "backend_unavailable"
        assert error["error"]["type"] == "server_error"
        assert (await ann.asked(input="Hi"))["status"] == "completed"


async def test_a_fault_of_the_gateway_is_shown_without_any_detail() -> None:
    async with site([RuntimeError("the key is 1234")], HELLO) as there:
        ann = await there.connect()
        error = await ann.refused(input="Hi")
        assert (error["status"], error["error"]["code"]) == (500, "internal_error")
        assert "1234" not in orjson.dumps(error).decode()
        assert (await ann.asked(input="Hi"))["status"] == "completed"


async def test_a_failure_amid_an_answer_is_told_in_it() -> None:
    async with site([final(0, "Hel", "lo")[:2], BackendUnavailable("gone")], HELLO) as there:
        ann = await there.connect()
        ann.send(input="Hi", store=False)
        events = await ann.answer()
        error = events[-2]
        assert set(error) == {"type", "sequence_number", "error"}
        assert error["error"]["message"] == "gone"
        assert fold(events).response["status"] == "failed"
        failed = events[-1]["response"]["id"]
        assert (await ann.refused(input="Hi", previous_response_id=failed))["error"]["code"] == (
            "previous_response_not_found"
        )
        assert (await ann.asked(input="Hi"))["status"] == "completed"


async def test_steering_gives_the_input_back() -> None:
    async with site(SLOW) as there:
        ann = await there.connect()
        ann.send(input="Hi")
        created = await ann.event()
        steer = {"previous_response_id": created["response"]["id"], "input": "No, the other one."}
        ann.send(text=orjson.dumps({**STEER, **steer}).decode())
        while (event := await ann.event())["type"] != "response.steer.failed":
            assert event["type"].startswith("response.")
        assert event["steer"] == steer
        assert event["error"]["code"] == "steering_not_supported"
        assert not there.turns.runs[0].cancelled
        ann.leave()
        await ann.ended()


async def test_what_a_client_only_tells_is_not_answered() -> None:
    async with site() as there:
        ann = await there.connect()
        ann.send(text='{"type":"response.processed","response_id":"resp_1"}')
        assert await ann.quiet()
        assert (await ann.asked(input="Hi"))["status"] == "completed"


# -- who leaves, who dawdles, what is too much


@pytest.mark.parametrize("lanes", [1, 3])
async def test_leaving_ends_everything_at_once(lanes: int) -> None:
    async with site(SLOW) as there:
        ann = await there.connect()
        for lane in range(lanes):
            ann.send(input="Hi", stream_id=f"{lane}")
            ann.send(input="Never asked", stream_id=f"{lane}")
        while len(there.turns.runs) < lanes or not all(run.taken for run in there.turns.runs):
            await asyncio.sleep(0.005)
        ann.leave()
        await ann.ended(AT_ONCE_S)
        assert len(there.turns.runs) == lanes
        assert all(run.cancelled and run.closed for run in there.turns.runs)


async def test_a_client_that_pauses_is_waited_for() -> None:
    async with site(drop_by_drop(200)) as there:
        ann = await there.connect(SHORT)
        ann.send(input="Hi")
        events = [await ann.event()]
        ann.reading.clear()
        await asyncio.sleep(0.1)
        taken = there.turns.runs[0].taken
        await asyncio.sleep(0.05)
        assert there.turns.runs[0].taken == taken
        ann.reading.set()
        assert fold(events + await ann.answer()).response["status"] == "completed"


async def test_a_client_that_only_sends_is_cut_off() -> None:
    async with site() as there:
        ann = await there.connect()
        ann.reading.clear()
        for _ in range(200):
            ann.send(text="no JSON")
        await ann.ended(2.0)


async def test_an_old_connection_finishes_what_runs_and_is_closed() -> None:
    slow: list[Step] = [final(0, "Hel", "lo")[:2], 0.8, [*final(0, "Hel", "lo")[2:], finished()]]
    async with site(slow, lasts_s=0.3) as there:
        ann = await there.connect(SHORT)
        ann.send(input="Hi")
        await ann.event()
        await asyncio.sleep(0.5)
        ann.send(input="Too late", stream_id="other")
        events: list[Any] = []
        while not events or events[-1]["type"] != "response.completed":
            events.append(await ann.event())
        [late] = [event for event in events if event["type"] == "error"]
        assert late["stream_id"] == "other"
        last = await ann.event()
        for error in (late, last):
            assert error["status"] == 400
            assert error["error"]["code"] == "websocket_connection_limit_reached"
        assert "stream_id" not in last
        assert await ann.closed() == 1000
        await ann.ended()
        assert len(there.turns.runs) == 1


async def test_an_idle_connection_lives_to_its_end() -> None:
    async with site(lasts_s=0.4) as there:
        ann = await there.connect(SHORT)
        await asyncio.sleep(0.03)
        assert (await ann.asked(input="Hi"))["status"] == "completed"
        assert (await ann.event())["error"]["code"] == "websocket_connection_limit_reached"
        assert await ann.closed() == 1000


async def test_a_connection_has_so_many_lanes() -> None:
    async with site() as there:
        ann = await there.connect()
        for number in range(32):
            assert (await ann.asked(input="Hi", stream_id=f"{number}"))["status"] == "completed"
        error = await ann.refused(input="Hi", stream_id="33rd")
        assert (error["status"], error["error"]["code"]) == (400, "websocket_stream_limit_reached")
        assert error["stream_id"] == "33rd"
        assert (await ann.asked(input="Hi", stream_id="0"))["status"] == "completed"
        assert (await ann.asked(input="Hi"))["status"] == "completed"


async def test_only_so_much_waits() -> None:
    async with site(SLOW) as there:
        ann = await there.connect()
        for _ in range(64):
            ann.send(input="Hi")
        ann.send(input="One more")
        while (event := await ann.event())["type"] != "error":
            assert event["type"].startswith("response.")
        assert (event["status"], event["error"]["code"]) == (503, "backend_overloaded")
        ann.leave()
        await ann.ended()
        assert len(there.turns.runs) <= 1
