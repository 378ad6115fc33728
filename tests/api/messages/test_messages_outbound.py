"""What becomes of the engine's events: whole and streamed the same message, every block in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.messages.folding import fold, named_events
from tests.api.messages.mounted import SEALER, request
from tests.api.scripted import (
    USAGE,
    ScriptedTurns,
    call,
    commentary,
    final,
    finished,
    hosted,
    listing,
    reasoning,
    unfit,
)
from unisono.api.messages.inbound import Thinking
from unisono.api.messages.outbound import MessageEvents, MessageFrame, to_message
from unisono.core.conversation import AssistantCall, AssistantReasoning, ToolResult
from unisono.core.events import Closed, Delta, Event, Finished, HostedCall, Opened, Ran, Repaired
from unisono.core.generation import FinishReason
from unisono.core.tool_arguments import read_arguments
from unisono.core.tools import ToolOutcome
from unisono.engine.collect import collect
from unisono.engine.interventions.requirements import UNMET_FORM
from unisono.engine.request import GenerationReport

Json = dict[str, Any]
TENANT = "team"
FRAME = MessageFrame(
    id="msg_1",
    model="gpt-oss",
    request_id="req_1",
    max_tokens=100,
    server_tool_names=frozenset({"browser", "python"}),
    sign=lambda text: SEALER.sign(TENANT, text),
    session="a talk",
    seal=lambda items, talk: SEALER.seal(TENANT, items, talk),
)
SHOWN = replace(FRAME, thinking=Thinking.SHOWN)
OMITTED = replace(FRAME, thinking=Thinking.OMITTED)
EARLY = replace(FRAME, hold_calls=False)


def served(builtin: str, tool: str, said: str, outcome: ToolOutcome) -> list[Event]:
    name = f"{builtin}.{tool}" if tool else builtin
    item = HostedCall(0, "call_h", name, f"builtin:{builtin}", tool, arguments=read_arguments(name, said))
    return [Opened(item), Delta(item, said), Closed(item, said, (7, 8)), Ran(item, outcome, outcome.text)]


def streamed(batches: Sequence[list[Event]], frame: MessageFrame, report: GenerationReport | None = None) -> Json:
    events = MessageEvents(frame, report or GenerationReport())
    return fold(named_events(b"".join(map(events.write, batches))))


def both(events: list[Event], frame: MessageFrame = FRAME, report: GenerationReport | None = None) -> Json:
    """The message, which is the same however it comes."""
    whole = to_message(collect(events), report or GenerationReport(), frame)
    assert streamed([events], frame, report) == whole
    assert streamed([[event] for event in events], frame, report) == whole
    return whole


def contents(events: list[Event], frame: MessageFrame = FRAME) -> list[Json]:
    content: list[Json] = both(events, frame)["content"]
    return content


ANSWERS: dict[str, tuple[list[Event], list[Json]]] = {
    "text": (final(0, "Hel", "lo"), [{"type": "text", "text": "Hello"}]),
    "nothing": (final(0), []),
    "a preamble and an answer": (
        [*commentary(0, "I look."), *final(1, "So.")],
        [{"type": "text", "text": "I look."}, {"type": "text", "text": "So."}],
    ),
    "thoughts that nobody asked for": ([*reasoning(0, "hm"), *final(1, "So.")], [{"type": "text", "text": "So."}]),
    "calls": (
        [*call(0, 0, "f", '{"a"', ": 1}"), *call(1, 1, "g")],
        [
            {"type": "tool_use", "id": "toolu_0", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "toolu_1", "name": "g", "input": {}},
        ],
    ),
    "a call that was cut": (
        [*final(0, "So."), *call(1, 0, "f", '{"a"', complete=False)],
        [{"type": "text", "text": "So."}],
    ),
    "arguments that are no object": (
        [*call(0, 0, "f", "[1]"), *call(1, 1, "f", '{"a')],
        [
            {"type": "tool_use", "id": "toolu_0", "name": "f", "input": {"unparsed_arguments": "[1]"}},
            {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"unparsed_arguments": '{"a'}},
        ],
    ),
    "what the gateway ran unasked": (
        [*listing(0, "find"), *hosted(0, "{}"), *final(1, "So.")],
        [{"type": "text", "text": "So."}],
    ),
    "what was mended": ([Repaired("missing-end", 3), *final(0, "So.")], [{"type": "text", "text": "So."}]),
}


@pytest.mark.parametrize(("events", "content"), ANSWERS.values(), ids=ANSWERS)
def test_an_answer_is_made_of_blocks(events: list[Event], content: list[Json]) -> None:
    assert contents([*events, finished()]) == content


def test_thoughts_are_signed() -> None:
    [thought, _] = contents([*reasoning(0, "h", "m"), *final(1, "So."), finished()], SHOWN)
    assert thought == {"type": "thinking", "thinking": "hm", "signature": SEALER.sign(TENANT, "hm")}


def test_thoughts_that_are_omitted_are_sealed() -> None:
    [thought, _] = contents([*reasoning(0, "h", "m"), *final(1, "So."), finished()], OMITTED)
    assert thought["thinking"] == ""
    assert SEALER.open(TENANT, thought["signature"]) == (AssistantReasoning("hm"),)


CALLS: dict[str, tuple[list[Event], Json, Json]] = {
    "a search": (
        served(
            "browser",
            "search",
            '{"query":"x"}',
            ToolOutcome("found", structured={"results": [{"url": "u", "title": "t"}]}),
        ),
        {"name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result"},
    ),
    "a page": (
        served("browser", "open", '{"id":0}', ToolOutcome("text", structured={"url": "u", "title": "t"})),
        {"name": "web_fetch", "input": {"id": 0}},
        {"type": "web_fetch_tool_result"},
    ),
    "a search that failed": (
        served("browser", "search", "{}", ToolOutcome("no", True)),
        {"name": "web_search", "input": {}},
        {"type": "web_search_tool_result"},
    ),
    "a program": (
        served("python", "", "print(6 * 7)", ToolOutcome("42\n")),
        {"name": "code_execution", "input": {"code": "print(6 * 7)"}},
        {"type": "code_execution_tool_result"},
    ),
}


@pytest.mark.parametrize(("events", "use", "result"), CALLS.values(), ids=CALLS)
def test_calls_of_server_tools_are_shown_with_what_came_of_them(events: list[Event], use: Json, result: Json) -> None:
    shown_use, shown_result = contents([*events, finished()])
    assert shown_use == {"type": "server_tool_use", "id": "srvtoolu_h", **use}
    assert shown_result.items() >= {**result, "tool_use_id": "srvtoolu_h"}.items()
    content = shown_result["content"]
    sealed = (content[0] if isinstance(content, list) else content)["encrypted_content"]
    [ran] = [event for event in events if isinstance(event, Ran)]
    said = next(event.text for event in events if isinstance(event, Closed))
    made = AssistantCall("call_h", ran.item.name, said, (7, 8))
    assert SEALER.open(TENANT, sealed) == (made, ToolResult("call_h", ran.item.name, ran.text_for_model))
    assert SEALER.session(TENANT, sealed) == "a talk"


BIG = '{"wei": 123456789012345678901234567890}'


async def test_numbers_of_any_size_stay_what_the_model_wrote() -> None:
    turns = ScriptedTurns([[*call(0, 0, "f", BIG), finished()]])
    whole = await request(turns).run()
    assert BIG.encode() in whole.body
    streamed = await request(turns, stream=True).run()
    assert fold(named_events(streamed.body))["content"][0]["name"] == "f"
    assert orjson.dumps(BIG) in streamed.body


def test_a_call_of_a_server_tool_may_hold_numbers_of_any_size() -> None:
    events = [*served("browser", "search", '{"topn": 123456789012345678901234567890}', ToolOutcome("so")), finished()]
    whole = orjson.dumps(to_message(collect(events), GenerationReport(), FRAME))
    assert b'{"topn": 123456789012345678901234567890}' in whole
    streamed = MessageEvents(FRAME, GenerationReport()).write(events)
    assert orjson.dumps('{"topn": 123456789012345678901234567890}') in streamed


EARLY_ARGUMENTS: dict[str, tuple[list[str], list[str]]] = {
    "an object": (['{"a"', ":1}"], ["", '{"a"', ":1}"]),
    "an object behind white space": ([" ", "\n", ' {"a"', ":1}"], ["", ' \n {"a"', ":1}"]),
    "nothing": ([], [""]),
    "white space": ([" "], [""]),
    "something else": (["[", "1]"], ["", '{"unparsed_arguments":"[1]"}']),
    "no JSON": (["n", "o"], ["", '{"unparsed_arguments":"no"}']),
}


@pytest.mark.parametrize(("said", "shown"), EARLY_ARGUMENTS.values(), ids=EARLY_ARGUMENTS)
def test_arguments_that_are_shown_early_begin_an_object_all_the_same(said: list[str], shown: list[str]) -> None:
    events: list[Event] = [*call(0, 0, "f", *said), finished()]
    writing = MessageEvents(EARLY, GenerationReport())
    told = named_events(b"".join(writing.write([event]) for event in events))
    assert [each["delta"]["partial_json"] for each in told if each["type"] == "content_block_delta"] == shown
    assert fold(told)["content"] == to_message(collect(events), GenerationReport(), EARLY)["content"]


CODES = {"call-limit": "max_uses_exceeded", "bad-tool-arguments": "invalid_tool_input", "tools-ended": "unavailable"}


@pytest.mark.parametrize(("rule", "code"), CODES.items())
def test_a_call_that_was_not_made_says_why(rule: str, code: str) -> None:
    *begun, ran = served("browser", "search", "{}", ToolOutcome("no", True))
    assert isinstance(ran, Ran)
    _, result = contents([*begun, replace(ran, rule=rule), finished()])
    assert result["content"]["type"] == "web_search_tool_result_error"
    assert result["content"]["error_code"] == code


STOPPED = Finished(FinishReason.STOP, USAGE, stop_sequence="END")
LENGTH = finished(FinishReason.LENGTH)
PAUSED = replace(finished(), paused=True)
FULL = replace(LENGTH, usage=replace(USAGE, completion_tokens=100))
ENDS: dict[str, tuple[list[Event], GenerationReport, str]] = {
    "by itself": ([*final(0, "So."), finished()], GenerationReport(), "end_turn"),
    "with a call": ([*call(0, 0, "f", "{}"), finished()], GenerationReport(), "tool_use"),
    "at a stop sequence": ([*final(0, "So."), STOPPED], GenerationReport(), "stop_sequence"),
    "at its bound": ([*final(0, "So."), FULL], GenerationReport(), "max_tokens"),
    "before its bound": ([*final(0, "So."), LENGTH], GenerationReport(), "model_context_window_exceeded"),
    "at a budget": ([*final(0, "So."), LENGTH], GenerationReport(unmet="No room."), "max_tokens"),
    "where it repeats itself": ([*final(0, "So."), LENGTH], GenerationReport(recoveries=["repetition"]), "max_tokens"),
    "within a call": (
        [*call(0, 0, "f", "{", complete=False), finished(cut_call=True)],
        GenerationReport(),
        "max_tokens",
    ),
    "within a second call": (
        [*call(0, 0, "f", "{}"), *call(1, 1, "f", "{", complete=False), finished(cut_call=True)],
        GenerationReport(),
        "tool_use",
    ),
    "unfit": ([*unfit(0, "No."), finished()], GenerationReport(unmet="Not JSON."), "refusal"),
    "unfit, which was found out late": ([*final(0, "No."), finished()], GenerationReport(unmet=UNMET_FORM), "refusal"),
    "without the call that was forced": (
        [*final(0, "No."), finished()],
        GenerationReport(unmet="No call."),
        "end_turn",
    ),
    "to go on later": ([*final(0, "So."), PAUSED], GenerationReport(), "pause_turn"),
    "to go on later, and a call": ([*call(0, 0, "f", "{}"), PAUSED], GenerationReport(), "tool_use"),
}


@pytest.mark.parametrize(("events", "report", "reason"), ENDS.values(), ids=ENDS)
def test_it_is_said_why_an_answer_ended(events: list[Event], report: GenerationReport, reason: str) -> None:
    message = both(events, FRAME, report)
    assert message["stop_reason"] == reason
    assert message["stop_sequence"] == ("END" if reason == "stop_sequence" else None)
    details = {"type": "refusal", "category": None, "explanation": report.unmet} if reason == "refusal" else None
    assert message["stop_details"] == details


def test_a_call_that_was_cut_before_the_clients_eyes_is_no_call() -> None:
    events: list[Event] = [*call(0, 0, "f", '{"a": 1', complete=False), finished(cut_call=True)]
    told = named_events(MessageEvents(EARLY, GenerationReport()).write(events))
    assert told[-2]["delta"]["stop_reason"] == "max_tokens"


def test_a_block_that_a_failure_ends_stays_open() -> None:
    events = MessageEvents(SHOWN, GenerationReport())
    began = events.write(reasoning(0, "hm")[:2])
    kinds = [event["type"] for event in named_events(began)]
    assert kinds == ["message_start", "content_block_start", "content_block_delta"]
    assert events.keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'


pieces = st.lists(st.text(max_size=4), max_size=3)
some = st.one_of(
    pieces.map(lambda texts: reasoning(0, *texts)),
    pieces.map(lambda texts: commentary(0, *texts)),
    pieces.map(lambda texts: final(0, *texts)),
    pieces.map(lambda texts: unfit(0, *texts)),
    st.builds(lambda texts, whole: call(0, 0, "f", *texts, complete=whole), pieces, st.booleans()),
    pieces.map(lambda texts: hosted(0, *texts)),
    pieces.map(lambda texts: served("browser", "search", "".join(texts), ToolOutcome("found"))),
)
cuts = st.lists(st.integers(0, 30), max_size=4)


@given(st.lists(some, max_size=5), cuts, st.sampled_from([FRAME, SHOWN, OMITTED]))
def test_a_stream_cut_anywhere_is_the_whole_answer(
    lives: list[list[Event]], places: list[int], frame: MessageFrame
) -> None:
    events: list[Event] = [*(event for life in lives for event in life), finished()]
    bounds = sorted({0, len(events), *(place for place in places if place < len(events))})
    batches = [events[one:other] for one, other in pairwise(bounds)]
    assert streamed(batches, frame) == to_message(collect(events), GenerationReport(), frame)
