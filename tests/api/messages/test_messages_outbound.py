"""Conversion of engine events to messages: complete and streamed responses are equal."""

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
from unisono.api.collected_answer import collect
from unisono.api.messages.inbound import Thinking
from unisono.api.messages.outbound import MessageEvents, MessageFrame, to_message
from unisono.core.conversation import AssistantCall, AssistantReasoning, ToolResult
from unisono.core.events import Closed, Delta, Event, Finished, HostedCall, Opened, Ran, Repaired
from unisono.core.generation import FinishReason
from unisono.core.observer import GenerationFacts
from unisono.core.server_tool_arguments import read_arguments
from unisono.core.tool_host import ToolOutcome
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
EARLY_CALLS = replace(FRAME, hold_calls=False)


def server_call(builtin: str, tool: str, arguments: str, outcome: ToolOutcome) -> list[Event]:
    name = f"{builtin}.{tool}" if tool else builtin
    item = HostedCall(0, "call_h", name, f"builtin:{builtin}", tool, arguments=read_arguments(name, arguments))
    return [Opened(item), Delta(item, arguments), Closed(item, arguments, (7, 8)), Ran(item, outcome, outcome.text)]


def streamed(batches: Sequence[list[Event]], frame: MessageFrame, report: GenerationReport | None = None) -> Json:
    events = MessageEvents(frame, report or GenerationReport())
    return fold(named_events(b"".join(map(events.write, batches))))


def checked_message(events: list[Event], frame: MessageFrame = FRAME, report: GenerationReport | None = None) -> Json:
    """Return the message after checking that every way of streaming gives the same one."""
    message = to_message(collect(events), report or GenerationReport(), frame)
    assert streamed([events], frame, report) == message
    assert streamed([[event] for event in events], frame, report) == message
    return message


def contents(events: list[Event], frame: MessageFrame = FRAME) -> list[Json]:
    content: list[Json] = checked_message(events, frame)["content"]
    return content


ANSWERS: dict[str, tuple[list[Event], list[Json]]] = {
    "text": (final(0, "Hel", "lo"), [{"type": "text", "text": "Hello"}]),
    "an empty answer": (final(0), []),
    "a preamble and an answer": (
        [*commentary(0, "I look."), *final(1, "So.")],
        [{"type": "text", "text": "I look."}, {"type": "text", "text": "So."}],
    ),
    "thinking that was not requested": ([*reasoning(0, "hm"), *final(1, "So.")], [{"type": "text", "text": "So."}]),
    "calls": (
        [*call(0, 0, "f", '{"a"', ": 1}"), *call(1, 1, "g")],
        [
            {"type": "tool_use", "id": "toolu_0", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "toolu_1", "name": "g", "input": {}},
        ],
    ),
    "a truncated call": (
        [*final(0, "So."), *call(1, 0, "f", '{"a"', complete=False)],
        [{"type": "text", "text": "So."}],
    ),
    "arguments that are not an object": (
        [*call(0, 0, "f", "[1]"), *call(1, 1, "f", '{"a')],
        [
            {"type": "tool_use", "id": "toolu_0", "name": "f", "input": {"unparsed_arguments": "[1]"}},
            {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"unparsed_arguments": '{"a'}},
        ],
    ),
    "server tools that are not shown": (
        [*listing(0, "find"), *hosted(0, "{}"), *final(1, "So.")],
        [{"type": "text", "text": "So."}],
    ),
    "a repaired message": ([Repaired("missing-end", 3), *final(0, "So.")], [{"type": "text", "text": "So."}]),
}


@pytest.mark.parametrize(("events", "content"), ANSWERS.values(), ids=ANSWERS)
def test_events_become_content_blocks(events: list[Event], content: list[Json]) -> None:
    assert contents([*events, finished()]) == content


def test_thinking_is_signed() -> None:
    [thought, _] = contents([*reasoning(0, "h", "m"), *final(1, "So."), finished()], SHOWN)
    assert thought == {"type": "thinking", "thinking": "hm", "signature": SEALER.sign(TENANT, "hm")}


def test_omitted_thinking_is_sealed() -> None:
    [thought, _] = contents([*reasoning(0, "h", "m"), *final(1, "So."), finished()], OMITTED)
    assert thought["thinking"] == ""
    assert SEALER.open(TENANT, thought["signature"]) == (AssistantReasoning("hm"),)


CALLS: dict[str, tuple[list[Event], Json, Json]] = {
    "a search": (
        server_call(
            "browser",
            "search",
            '{"query":"x"}',
            ToolOutcome("found", structured={"results": [{"url": "u", "title": "t"}]}),
        ),
        {"name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result"},
    ),
    "a search without hits": (
        server_call("browser", "search", '{"query":"x"}', ToolOutcome("none", structured={"results": []})),
        {"name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "content": []},
    ),
    "a search on a server that returns text": (
        server_call("browser", "search", '{"query":"x"}', ToolOutcome("found")),
        {"name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "content": []},
    ),
    "an opened page": (
        server_call("browser", "open", '{"id":0}', ToolOutcome("text", structured={"url": "u", "title": "t"})),
        {"name": "web_fetch", "input": {"id": 0}},
        {"type": "web_fetch_tool_result"},
    ),
    "a failed search": (
        server_call("browser", "search", "{}", ToolOutcome("no", True)),
        {"name": "web_search", "input": {}},
        {"type": "web_search_tool_result"},
    ),
    "a program": (
        server_call("python", "", "print(6 * 7)", ToolOutcome("42\n")),
        {"name": "code_execution", "input": {"code": "print(6 * 7)"}},
        {"type": "code_execution_tool_result"},
    ),
}


@pytest.mark.parametrize(("events", "use", "result"), CALLS.values(), ids=CALLS)
def test_server_tool_calls_are_followed_by_their_sealed_results(events: list[Event], use: Json, result: Json) -> None:
    use_block, result_block = contents([*events, finished()])
    assert use_block == {"type": "server_tool_use", "id": "srvtoolu_h", **use}
    assert result_block.items() >= {**result, "tool_use_id": "srvtoolu_h"}.items()
    content = result_block["content"] or result_block
    sealed = (content[0] if isinstance(content, list) else content)["encrypted_content"]
    [ran] = [event for event in events if isinstance(event, Ran)]
    arguments = next(event.text for event in events if isinstance(event, Closed))
    expected_call = AssistantCall("call_h", ran.item.name, arguments, (7, 8))
    assert SEALER.open(TENANT, sealed) == (expected_call, ToolResult("call_h", ran.item.name, ran.text_for_model))
    assert SEALER.session(TENANT, sealed) == "a talk"


def program(text: str, *, is_error: bool = False, **facts: Json) -> ToolOutcome:
    return ToolOutcome(text, is_error, structured=dict(facts) or None)


# case: (outcome of the call, stdout, stderr, return code)
PROGRAMS: dict[str, tuple[ToolOutcome, str, str, int]] = {
    "success": (program("42", exit_code=0, timed_out=False), "42", "", 0),
    "an exception": (program("ZeroDivisionError", exit_code=1, timed_out=False), "", "ZeroDivisionError", 1),
    "an exit code": (program("bye", exit_code=3, timed_out=False), "", "bye", 3),
    "a signal": (program("killed", exit_code=-9, timed_out=False), "", "killed", -9),
    "a time limit": (program("late", exit_code=None, timed_out=True), "", "late", 1),
    "a time limit after a caught signal": (program("late", exit_code=0, timed_out=True), "", "late", 1),
    "an unknown exit code": (program("stopped", exit_code=None, timed_out=False), "", "stopped", 1),
    "a server without exit codes": (program("42"), "42", "", 0),
    "a server with an invalid exit code": (program("42", exit_code="none"), "42", "", 0),
    "a failed call": (program("unreachable", is_error=True), "", "unreachable", 1),
}


@pytest.mark.parametrize(("outcome", "stdout", "stderr", "code"), PROGRAMS.values(), ids=PROGRAMS)
def test_failed_program_has_a_return_code_and_its_text_in_stderr(
    outcome: ToolOutcome, stdout: str, stderr: str, code: int
) -> None:
    _, result = contents([*server_call("python", "", "main()", outcome), finished()])
    content = result["content"]
    assert content["type"] == "code_execution_result"
    assert (content["stdout"], content["stderr"], content["return_code"]) == (stdout, stderr, code)


LARGE_NUMBER = '{"wei": 123456789012345678901234567890}'


async def test_large_numbers_in_tool_input_are_unchanged() -> None:
    service = ScriptedTurns([[*call(0, 0, "f", LARGE_NUMBER), finished()]])
    complete = await request(service).run()
    assert LARGE_NUMBER.encode() in complete.body
    streamed = await request(service, stream=True).run()
    assert fold(named_events(streamed.body))["content"][0]["name"] == "f"
    assert orjson.dumps(LARGE_NUMBER) in streamed.body


def test_large_numbers_in_server_tool_input_are_unchanged() -> None:
    events = [
        *server_call("browser", "search", '{"topn": 123456789012345678901234567890}', ToolOutcome("so")),
        finished(),
    ]
    complete = orjson.dumps(to_message(collect(events), GenerationReport(), FRAME))
    assert b'{"topn": 123456789012345678901234567890}' in complete
    streamed = MessageEvents(FRAME, GenerationReport()).write(events)
    assert orjson.dumps('{"topn": 123456789012345678901234567890}') in streamed


EARLY_ARGUMENTS: dict[str, tuple[list[str], list[str]]] = {
    "an object": (['{"a"', ":1}"], ["", '{"a"', ":1}"]),
    "an object after white space": ([" ", "\n", ' {"a"', ":1}"], ["", ' \n {"a"', ":1}"]),
    "no arguments": ([], [""]),
    "white space": ([" "], [""]),
    "an array": (["[", "1]"], ["", '{"unparsed_arguments":"[1]"}']),
    "invalid JSON": (["n", "o"], ["", '{"unparsed_arguments":"no"}']),
}


@pytest.mark.parametrize(("arguments", "expected"), EARLY_ARGUMENTS.values(), ids=EARLY_ARGUMENTS)
def test_arguments_streamed_early_always_form_an_object(arguments: list[str], expected: list[str]) -> None:
    events: list[Event] = [*call(0, 0, "f", *arguments), finished()]
    writer = MessageEvents(EARLY_CALLS, GenerationReport())
    events_on_wire = named_events(b"".join(writer.write([event]) for event in events))
    assert [
        event["delta"]["partial_json"] for event in events_on_wire if event["type"] == "content_block_delta"
    ] == expected
    assert fold(events_on_wire)["content"] == to_message(collect(events), GenerationReport(), EARLY_CALLS)["content"]


CODES = {"call-limit": "max_uses_exceeded", "bad-tool-arguments": "invalid_tool_input", "tools-ended": "unavailable"}


@pytest.mark.parametrize(("rule", "code"), CODES.items())
def test_a_server_tool_call_that_was_not_run_has_an_error_code(rule: str, code: str) -> None:
    *call_events, ran = server_call("browser", "search", "{}", ToolOutcome("no", True))
    assert isinstance(ran, Ran)
    _, result = contents([*call_events, replace(ran, rule=rule), finished()])
    assert result["content"]["type"] == "web_search_tool_result_error"
    assert result["content"]["error_code"] == code


FOUND = server_call("browser", "search", "{}", ToolOutcome("found", structured={"results": []}))
OPENED = server_call("browser", "open", "{}", ToolOutcome("text", structured={"url": "u", "title": "t"}))
PERFORMED: dict[str, tuple[list[Event], tuple[int, int]]] = {
    "a search": (FOUND, (1, 0)),
    "a page": (OPENED, (0, 1)),
    "a failed or refused search": (server_call("browser", "search", "{}", ToolOutcome("no", True)), (0, 0)),
    "a search that was not run": (FOUND[:-1], (0, 0)),
}


@pytest.mark.parametrize(("events", "counts"), PERFORMED.values(), ids=PERFORMED)
def test_the_usage_counts_the_calls_that_succeeded(events: list[Event], counts: tuple[int, int]) -> None:
    usage = checked_message([*events, finished()])["usage"]
    assert usage["server_tool_use"] == dict(zip(("web_search_requests", "web_fetch_requests"), counts, strict=True))


STOPPED = Finished(FinishReason.STOP, USAGE, stop_sequence="END")
LENGTH = finished(FinishReason.LENGTH)
PAUSED = replace(finished(), paused=True)
LIMITED = GenerationFacts(window_limit=USAGE.completion_tokens)
STOP_REASONS: dict[str, tuple[list[Event], GenerationReport, str]] = {
    "end of the message": ([*final(0, "So."), finished()], GenerationReport(), "end_turn"),
    "a call": ([*call(0, 0, "f", "{}"), finished()], GenerationReport(), "tool_use"),
    "a stop sequence": ([*final(0, "So."), STOPPED], GenerationReport(), "stop_sequence"),
    "max_tokens reached, or stopped by the backend": ([*final(0, "So."), LENGTH], GenerationReport(), "max_tokens"),
    "context window full": (
        [*final(0, "So."), LENGTH],
        GenerationReport(facts=LIMITED),
        "model_context_window_exceeded",
    ),
    "stopped by the backend before the context window was full": (
        [*final(0, "So."), LENGTH],
        GenerationReport(facts=replace(LIMITED, window_limit=100)),
        "max_tokens",
    ),
    "a reasoning budget reached": (
        [*final(0, "So."), LENGTH],
        GenerationReport(unmet="No room.", facts=LIMITED),
        "max_tokens",
    ),
    "a repetition": (
        [*final(0, "So."), LENGTH],
        GenerationReport(recoveries=["repetition"], facts=LIMITED),
        "max_tokens",
    ),
    "end inside a call": (
        [*call(0, 0, "f", "{", complete=False), finished(cut_call=True)],
        GenerationReport(),
        "max_tokens",
    ),
    "end inside a second call": (
        [*call(0, 0, "f", "{}"), *call(1, 1, "f", "{", complete=False), finished(cut_call=True)],
        GenerationReport(),
        "tool_use",
    ),
    "a refused format": ([*unfit(0, "No."), finished()], GenerationReport(unmet="Not JSON."), "refusal"),
    "a format violation found at the end": (
        [*final(0, "No."), finished()],
        GenerationReport(unmet=UNMET_FORM),
        "refusal",
    ),
    "a forced call missing": (
        [*final(0, "No."), finished()],
        GenerationReport(unmet="No call."),
        "end_turn",
    ),
    "a pause": ([*final(0, "So."), PAUSED], GenerationReport(), "pause_turn"),
    "a pause with a call": ([*call(0, 0, "f", "{}"), PAUSED], GenerationReport(), "tool_use"),
}


@pytest.mark.parametrize(("events", "report", "reason"), STOP_REASONS.values(), ids=STOP_REASONS)
def test_the_stop_reason_matches_the_end_of_the_response(
    events: list[Event], report: GenerationReport, reason: str
) -> None:
    message = checked_message(events, FRAME, report)
    assert message["stop_reason"] == reason
    assert message["stop_sequence"] == ("END" if reason == "stop_sequence" else None)
    details = {"type": "refusal", "category": None, "explanation": report.unmet} if reason == "refusal" else None
    assert message["stop_details"] == details


def test_a_truncated_call_streamed_early_stops_with_max_tokens() -> None:
    events: list[Event] = [*call(0, 0, "f", '{"a": 1', complete=False), finished(cut_call=True)]
    events_on_wire = named_events(MessageEvents(EARLY_CALLS, GenerationReport()).write(events))
    assert events_on_wire[-2]["delta"]["stop_reason"] == "max_tokens"


def test_an_unfinished_block_stays_open_during_keep_alives() -> None:
    events = MessageEvents(SHOWN, GenerationReport())
    output = events.write(reasoning(0, "hm")[:2])
    kinds = [event["type"] for event in named_events(output)]
    assert kinds == ["message_start", "content_block_start", "content_block_delta"]
    assert events.keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'


text_pieces = st.lists(st.text(max_size=4), max_size=3)
item_events = st.one_of(
    text_pieces.map(lambda texts: reasoning(0, *texts)),
    text_pieces.map(lambda texts: commentary(0, *texts)),
    text_pieces.map(lambda texts: final(0, *texts)),
    text_pieces.map(lambda texts: unfit(0, *texts)),
    st.builds(lambda texts, whole: call(0, 0, "f", *texts, complete=whole), text_pieces, st.booleans()),
    text_pieces.map(lambda texts: hosted(0, *texts)),
    text_pieces.map(lambda texts: server_call("browser", "search", "".join(texts), ToolOutcome("found"))),
)
cut_positions = st.lists(st.integers(0, 30), max_size=4)


@given(st.lists(item_events, max_size=5), cut_positions, st.sampled_from([FRAME, SHOWN, OMITTED]))
def test_a_stream_in_any_batches_equals_the_complete_message(
    items: list[list[Event]], cut_places: list[int], frame: MessageFrame
) -> None:
    events: list[Event] = [*(event for item in items for event in item), finished()]
    bounds = sorted({0, len(events), *(place for place in cut_places if place < len(events))})
    batches = [events[start:stop] for start, stop in pairwise(bounds)]
    assert streamed(batches, frame) == to_message(collect(events), GenerationReport(), frame)
