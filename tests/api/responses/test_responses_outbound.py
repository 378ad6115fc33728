"""Outbound Responses events: order, numbers, and equality of streamed and stored responses."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.responses.folding import Event, fold, kind_of, parsed
from tests.api.responses.frames import NOW, frame, ids, request_of, streamed
from tests.api.scripted import call, commentary, final, finished, hosted, listing, reasoning, request, unfit
from unisono.api.responses.outbound.dialects import OPEN_RESPONSES, OPENAI, Dialect
from unisono.api.responses.outbound.events import ResponseEvents
from unisono.api.responses.outbound.failures import failure_in
from unisono.api.responses.outbound.response import ResponseFrame, to_response
from unisono.api.responses.outbound.stored_stream import replay_events
from unisono.core import events as engine_events
from unisono.core.conversation import AssistantCall, AssistantMessage, AssistantReasoning, Item, Phase, ToolResult
from unisono.core.events import Closed, Delta, Opened, Reasoning, Repaired, Text, ToolCall
from unisono.core.generation import FinishReason
from unisono.core.state_store import Status, StoredResponse
from unisono.engine.request import GenerationReport
from unisono.engine.server_tools.call_verdicts import OUTCOME_UNKNOWN
from unisono.errors import (
    BackendError,
    BackendOverloaded,
    BackendUnavailable,
    BackendUnfit,
    ContextTooLong,
    InvalidRequest,
    QuotaExceeded,
    Refused,
    ShareExceeded,
    StoreConflict,
    UnisonoError,
    UnsupportedValue,
)

TEXT_EVENTS = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
TEXT_EVENTS += ["content_part.done", "output_item.done"]
REASONING_EVENTS = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"]
REASONING_EVENTS += ["content_part.done", "output_item.done"]
REFUSAL_EVENTS = [name.replace("output_text", "refusal") for name in TEXT_EVENTS]
CALL_EVENTS = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
CUSTOM_CALL_EVENTS = [
    "output_item.added",
    "custom_tool_call_input.delta",
    "custom_tool_call_input.done",
    "output_item.done",
]


TOOL_LIST_EVENTS = ["output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done"]
SERVER_CALL_EVENTS = [
    "output_item.added",
    "mcp_call.in_progress",
    "mcp_call_arguments.delta",
    "mcp_call_arguments.done",
]
SERVER_CALL_EVENTS += ["mcp_call.completed", "output_item.done"]


def failed(item_events: list[str]) -> list[str]:
    return [name.replace(".completed", ".failed") for name in item_events]


def without_delta(item_events: list[str]) -> list[str]:
    return [name for name in item_events if not name.endswith(".delta")]


CASES: dict[str, tuple[list[engine_events.Event], list[str], str]] = {
    # case: (engine events, names of the item events, name of the terminal event)
    "an answer": ([*final(0, "Hi"), finished()], TEXT_EVENTS, "completed"),
    "no output": ([finished()], [], "completed"),
    "an answer that violates its format": (
        [*reasoning(0, "hm"), *unfit(1, "No", "."), finished()],
        [*REASONING_EVENTS, *REFUSAL_EVENTS],
        "completed",
    ),
    "an empty answer that violates its format": ([*unfit(0), finished()], without_delta(REFUSAL_EVENTS), "completed"),
    "an empty answer": ([*final(0), finished()], without_delta(TEXT_EVENTS), "completed"),
    "an item without deltas": (
        [Opened(Text(0, Phase.FINAL)), Closed(Text(0, Phase.FINAL), "Hi"), finished()],
        TEXT_EVENTS,
        "completed",
    ),
    "an empty reasoning item": ([*reasoning(0, ""), *final(1, "Hi"), finished()], TEXT_EVENTS, "completed"),
    "reasoning and an answer": (
        [*reasoning(0, "hm"), *final(1, "Hi"), finished()],
        [*REASONING_EVENTS, *TEXT_EVENTS],
        "completed",
    ),
    "a preamble and a call": (
        [*commentary(0, "Look."), *call(1, 0, "f", '{"a"', ":1}"), finished()],
        [*TEXT_EVENTS, *CALL_EVENTS],
        "completed",
    ),
    "a call without arguments": ([*call(0, 0, "f"), finished()], without_delta(CALL_EVENTS), "completed"),
    "free text": ([*call(0, 0, "free", '{"input":"ls"}'), finished()], CUSTOM_CALL_EVENTS, "completed"),
    "a truncated call": ([*call(0, 0, "f", '{"a', complete=False), finished(cut_call=True)], [], "incomplete"),
    "max_output_tokens reached": (
        [
            Opened(Text(0, Phase.FINAL)),
            Delta(Text(0, Phase.FINAL), "Hi"),
            Closed(Text(0, Phase.FINAL), "Hi", complete=False),
            finished(FinishReason.LENGTH),
        ],
        TEXT_EVENTS,
        "incomplete",
    ),
    "a call, then max_output_tokens reached": (
        [*call(0, 0, "f", "{}"), finished(FinishReason.LENGTH)],
        CALL_EVENTS,
        "completed",
    ),
    "a tool list, a server call and an answer": (
        [*listing(0, "find"), *hosted(0, '{"a"', ":1}"), *final(1, "Hi"), finished()],
        [*TOOL_LIST_EVENTS, *SERVER_CALL_EVENTS, *TEXT_EVENTS],
        "completed",
    ),
    "a failed tool list": ([*listing(0, error="It is gone."), finished()], failed(TOOL_LIST_EVENTS), "completed"),
    "a call that failed": (
        [*hosted(0, "{}", said="no", error=True), finished()],
        failed(SERVER_CALL_EVENTS),
        "completed",
    ),
    "a server call without arguments": ([*hosted(0), finished()], without_delta(SERVER_CALL_EVENTS), "completed"),
    "an approved call": ([*hosted(0, "{}", approval="mcpr_1"), finished()], SERVER_CALL_EVENTS, "completed"),
    "an approval request": (
        [*request(0, '{"a"', ":1}"), finished()],
        ["output_item.added", "output_item.done"],
        "completed",
    ),
    "a server call and a client call": (
        [*hosted(0, "{}"), *call(1, 0, "f", "{}"), finished()],
        [*SERVER_CALL_EVENTS, *CALL_EVENTS],
        "completed",
    ),
    "a repair": ([Repaired("x", 1), *final(0, "a"), finished()], TEXT_EVENTS, "completed"),
}


def names(events: list[Event]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


@pytest.mark.parametrize(("stream", "item_events", "last"), CASES.values(), ids=CASES)
def test_events_have_the_documented_order(stream: list[engine_events.Event], item_events: list[str], last: str) -> None:
    events, stored = streamed([stream], frame())
    assert names(events) == ["created", "in_progress", *item_events, last]
    folded = fold(events)
    assert folded.response == to_response(stored)
    assert folded.response["status"] == last


@pytest.mark.parametrize(("stream", "item_events", "last"), CASES.values(), ids=CASES)
def test_complete_streamed_and_stored_responses_are_equal(
    stream: list[engine_events.Event], item_events: list[str], last: str
) -> None:
    assert_equal_responses(stream, frame())


def assert_equal_responses(stream: list[engine_events.Event], response_frame: ResponseFrame) -> None:
    report = GenerationReport("vllm-1", 1, ["missing-end"])
    events, stored = streamed([[event] for event in stream], response_frame, report)
    silent = ResponseEvents(response_frame, report, new_id=ids(), clock=lambda: NOW, should_emit=False)
    assert silent.write(stream) == []
    complete = silent.stored
    assert complete is not None
    assert stored == complete
    assert fold(events).response == to_response(complete, response_frame.dialect)
    assert fold(parsed(replay_events(complete, response_frame.dialect))).response == to_response(
        complete, response_frame.dialect
    )


class RefusedByTheOperator(Refused):
    """Error class of a hook, which is defined after the dialects."""

    code = "not_today"


def test_a_logged_error_keeps_its_type_in_another_dialect() -> None:
    for error in (
        RefusedByTheOperator("No."),
        StoreConflict("Changed."),
        ShareExceeded("Busy."),
        BackendError("Down."),
    ):
        logged = {"sequence_number": 3, **OPENAI.error(error)}
        expected = {"sequence_number": 3, **OPEN_RESPONSES.error(error)}
        assert OPEN_RESPONSES.translated(logged) == expected


EXACT_FAILURES: dict[str, tuple[UnisonoError, str]] = {
    # case: (error, code of the field `error`)
    "of the client": (Refused("No."), "invalid_prompt"),
    "of a field": (UnsupportedValue("No.", param="tools.0"), "invalid_prompt"),
    "of the backend": (BackendUnfit("Unfit.", retry_after_s=7), "server_error"),
    "of a limit": (QuotaExceeded("Spent."), "server_error"),
}


@pytest.mark.parametrize(("error", "code"), EXACT_FAILURES.values(), ids=EXACT_FAILURES)
@pytest.mark.parametrize("dialect", [OPENAI, OPEN_RESPONSES], ids=lambda dialect: dialect.name)
def test_a_stored_failure_is_the_exact_error(error: UnisonoError, code: str, dialect: Dialect) -> None:
    events = ResponseEvents(frame(dialect=dialect), GenerationReport(), new_id=ids(), clock=lambda: NOW)
    live = parsed([*events.fail(error), events.last()])
    stored = events.stored
    assert stored is not None
    assert stored.error == {"code": code, "message": error.message}
    restored = failure_in(stored)
    for name in ("status", "type", "code", "message", "param", "retry_after_s"):
        assert getattr(restored, name) == getattr(error, name)
    assert "failure" not in to_response(stored)
    replayed = parsed(replay_events(stored, dialect))
    assert replayed == live


# Errors of responses that earlier versions stored.
EARLIER_FAILURES = {
    "context_length_exceeded": ContextTooLong,
    "invalid_prompt": InvalidRequest,
    "rate_limit_exceeded": BackendOverloaded,
    "server_error": BackendError,
}


@pytest.mark.parametrize("code", EARLIER_FAILURES)
def test_a_failure_that_an_earlier_version_stored_is_read(code: str) -> None:
    error = {"code": code, "message": "It failed."}
    stored = StoredResponse("resp_1", Status.FAILED, "m", 1.0, request=frame().request, error=error)
    failure = failure_in(stored)
    assert (type(failure), failure.message) == (EARLIER_FAILURES[code], "It failed.")
    [event] = [event for event in parsed(replay_events(stored)) if event["type"] == "error"]
    assert event == {**event, "param": None, **error}


SERVER_TOOL_ITEMS: dict[str, tuple[list[engine_events.Event], list[Item], dict[str, Any]]] = {
    # case: (engine events, items for later prompts, fields of the wire item)
    "a call": (
        hosted(0, '{"a":1}', said="found"),
        [
            AssistantCall("call_h0", "docs__find", '{"a":1}', (200006, 0)),
            ToolResult("call_h0", "docs__find", "found"),
        ],
        {
            "id": "mcp_h0",
            "type": "mcp_call",
            "status": "completed",
            "approval_request_id": None,
            "arguments": '{"a":1}',
            "error": None,
            "name": "find",
            "output": "found",
            "server_label": "docs",
        },
    ),
    "a call that failed": (
        hosted(0, "{}", said="no", error=True),
        [AssistantCall("call_h0", "docs__find", "{}", (200006, 0)), ToolResult("call_h0", "docs__find", "no")],
        {
            "status": "failed",
            "output": None,
            "error": {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "no"}]},
        },
    ),
    "an approved call means its result only": (
        hosted(0, "{}", said="found", approval="mcpr_1"),
        [ToolResult("call_h0", "docs__find", "found")],
        {"status": "completed", "approval_request_id": "mcpr_1", "output": "found"},
    ),
    "an approval request means the call": (
        request(0, "{}"),
        [AssistantCall("call_h0", "docs__find", "{}", (200006, 0))],
        {"id": "mcpr_0", "type": "mcp_approval_request", "arguments": "{}", "name": "find", "server_label": "docs"},
    ),
    "a tool list has no meaning": (
        listing(0, "find"),
        [],
        {
            "id": "mcpl_0",
            "type": "mcp_list_tools",
            "server_label": "docs",
            "tools": [{"name": "find", "description": "", "input_schema": {}, "annotations": None}],
            "error": None,
        },
    ),
    "a cancelled call": (
        hosted(0, "{}")[:-1],
        [
            AssistantCall("call_h0", "docs__find", "{}", (200006, 0)),
            ToolResult("call_h0", "docs__find", OUTCOME_UNKNOWN),
        ],
        {"status": "incomplete", "output": None, "error": None},
    ),
}


@pytest.mark.parametrize(("events", "meaning", "fields"), SERVER_TOOL_ITEMS.values(), ids=SERVER_TOOL_ITEMS)
def test_server_tool_items_are_stored_with_their_meaning(
    events: list[engine_events.Event], meaning: list[Item], fields: dict[str, Any]
) -> None:
    writer = ResponseEvents(frame(), GenerationReport(), new_id=ids(), clock=lambda: NOW)
    wire_events = [*writer.write(events), *writer.cancel(), writer.last()]
    fold(parsed(wire_events))
    assert writer.stored is not None
    [item] = writer.stored.output
    assert list(item.meaning) == meaning
    assert item.wire.items() >= fields.items()
    assert writer.acted is (item.wire["type"] == "mcp_call")


def test_server_tool_events_have_the_unisono_prefix_in_open_responses() -> None:
    stream = [*listing(0, "find"), *hosted(0, "{}"), *request(1, "{}"), finished()]
    events = streamed([stream], frame(dialect=OPEN_RESPONSES))[0]
    prefixed = [event["type"] for event in events if "mcp" in event["type"]]
    assert prefixed == [
        "unisono:mcp_list_tools.in_progress",
        "unisono:mcp_list_tools.completed",
        "unisono:mcp_call.in_progress",
        "unisono:mcp_call_arguments.delta",
        "unisono:mcp_call_arguments.done",
        "unisono:mcp_call.completed",
    ]
    kinds = [item["type"] for item in fold(events).output]
    assert kinds == ["unisono:mcp_list_tools", "unisono:mcp_call", "unisono:mcp_approval_request"]


TEXTS = st.lists(st.text(max_size=6), max_size=3)


@st.composite
def streams(draw: st.DrawFn) -> list[engine_events.Event]:
    """Generate any engine output, with truncated messages, empty reasoning and truncated calls."""
    events: list[engine_events.Event] = []
    calls = cut = 0
    for index in range(draw(st.integers(0, 6))):
        pieces, complete = draw(TEXTS), draw(st.booleans())
        kind = draw(st.sampled_from(["reasoning", "final", "commentary", "call", "hosted", "request", "listing"]))
        if kind == "hosted":
            events += hosted(index, *pieces, said=draw(st.text(max_size=6)), error=not complete)
            continue
        if kind == "request":
            events += request(index, *pieces)
            continue
        if kind == "listing":
            events += listing(index, *pieces, error=None if complete else "gone")
            continue
        if kind == "call":
            name = draw(st.sampled_from(["f", "free", "files__read"]))
            item_events = call(index, calls, name, *pieces, complete=complete)
            calls, cut = calls + 1, cut + (not complete)
        else:
            item_events = {"reasoning": reasoning, "final": final, "commentary": commentary}[kind](index, *pieces)
        [*first_events, closed] = item_events
        assert isinstance(closed, Closed)
        tokens = (200006, index) if complete and draw(st.booleans()) else ()
        events += [*first_events, Closed(closed.item, closed.text, tokens, complete)]
        if draw(st.booleans()):
            events.append(Repaired("rule", index))
    return [*events, finished(draw(st.sampled_from(FinishReason)), cut_call=bool(cut))]


DIALECTS = st.sampled_from([OPENAI, OPEN_RESPONSES])


SUMMARIES = st.sampled_from([0, 8, 600])


@given(streams(), DIALECTS, st.booleans(), st.booleans(), SUMMARIES)
def test_any_stream_equals_the_complete_response(
    stream: list[engine_events.Event], dialect: Dialect, show_reasoning: bool, seal_reasoning: bool, summary_chars: int
) -> None:
    assert_equal_responses(
        stream,
        frame(
            dialect=dialect,
            show_reasoning=show_reasoning,
            summary_chars=summary_chars,
            seal=(lambda item: f"sealed {item!r}") if seal_reasoning else None,
        ),
    )


@given(streams(), st.lists(st.integers(0, 60), max_size=5))
def test_batch_boundaries_do_not_change_the_stored_response(stream: list[engine_events.Event], cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(stream)]
    batches = [stream[start:stop] for start, stop in pairwise(places) if stream[start:stop]]
    assert streamed(batches, frame(summary_chars=8))[1] == streamed([stream], frame(summary_chars=8))[1]


@given(streams())
def test_calls_streamed_early_keep_the_stream_valid(stream: list[engine_events.Event]) -> None:
    events, stored = streamed([stream], frame(hold_calls=False))
    folded = fold(events)
    assert folded.response == to_response(stored)
    cut = any(item.get("status") == "incomplete" and item["type"] == "function_call" for item in folded.output)
    assert not cut or stored.status is Status.INCOMPLETE


@given(streams(), st.integers(0, 60), st.sampled_from(["fail", "cancel"]))
def test_a_stream_failed_or_cancelled_anywhere_ends_properly(
    stream: list[engine_events.Event], position: int, ending: str
) -> None:
    events = ResponseEvents(frame(summary_chars=600), GenerationReport(), new_id=ids(), clock=lambda: NOW)
    wire_events = events.write(stream[: min(position, len(stream) - 1)]) if position else []
    wire_events += events.fail(BackendUnavailable("It is gone.")) if ending == "fail" else events.cancel()
    folded = fold(parsed([*wire_events, events.last()]))
    assert folded.response["status"] == ("failed" if ending == "fail" else "cancelled")
    assert (folded.error is not None) == (ending == "fail")
    assert [item.get("status") for item in folded.output[:-1]].count("incomplete") == 0


@given(streams())
def test_only_the_last_item_is_incomplete(stream: list[engine_events.Event]) -> None:
    output = fold(streamed([stream], frame())[0]).output
    assert not any(item.get("status") == "incomplete" for item in output[:-1])


def test_item_ids_have_the_prefix_of_their_type_and_are_stored() -> None:
    stream = [*reasoning(0, "hm"), *commentary(1, "Look."), *call(2, 0, "f", "{}"), *call(3, 1, "free", "x")]
    events, stored = streamed([[*stream, finished()]], frame())
    assert [item.id for item in stored.output] == ["rs_0", "msg_1", "fc_2", "ctc_3"]
    assert [item["id"] for item in fold(events).output] == [item.id for item in stored.output]


def test_items_have_the_documented_shape() -> None:
    stream = [*reasoning(0, "hm"), *commentary(1, "Look."), *call(2, 0, "files__read", "{}"), *call(3, 1, "free", "x")]
    events, _ = streamed([[*stream, finished()]], frame())
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert added[0] == {"id": "rs_0", "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
    assert (added[1]["phase"], added[1]["content"]) == ("commentary", [])
    assert fold(events).output == [
        {
            "id": "rs_0",
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {
            "id": "msg_1",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "Look.", "annotations": [], "logprobs": []}],
        },
        {
            "id": "fc_2",
            "type": "function_call",
            "status": "completed",
            "call_id": "call_0",
            "name": "read",
            "namespace": "files",
            "arguments": "{}",
        },
        {
            "id": "ctc_3",
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "call_1",
            "name": "free",
            "input": "x",
        },
    ]


def test_deltas_of_one_batch_are_merged_per_item() -> None:
    first, second = Text(0, Phase.COMMENTARY), Text(1, Phase.FINAL)
    batch: list[engine_events.Event] = [Opened(first), Delta(first, "a"), Delta(first, "b"), Closed(first, "ab")]
    batch += [Opened(second), Delta(second, "c"), Delta(second, "d"), Closed(second, "cd"), finished()]
    events, _ = streamed([batch], frame())
    assert [event["delta"] for event in events if "delta" in event] == ["ab", "cd"]
    assert [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"] == [[], []]


def test_a_truncated_message_followed_by_another_is_complete() -> None:
    truncated = [Opened(Text(0, Phase.COMMENTARY)), Closed(Text(0, Phase.COMMENTARY), "Lo", complete=False)]
    events, stored = streamed([[*truncated, *final(1, "Hi"), finished(FinishReason.LENGTH)]], frame())
    assert [item.get("status") for item in fold(events).output] == ["completed", "completed"]
    assert stored.status is Status.INCOMPLETE


def test_an_incomplete_response_has_its_reason() -> None:
    item = Text(0, Phase.FINAL)
    stream = [Opened(item), Delta(item, "Hi"), Closed(item, "Hi", complete=False), finished(FinishReason.LENGTH)]
    folded = fold(streamed([stream], frame())[0])
    assert folded.response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert folded.response["completed_at"] is None
    assert folded.output[-1]["status"] == "incomplete"


FAILURES: dict[str, tuple[UnisonoError, str]] = {
    "overloaded": (BackendOverloaded("Busy."), "rate_limit_exceeded"),
    "too long": (ContextTooLong("Too long."), "context_length_exceeded"),
    "gone": (BackendUnavailable("Gone."), "server_error"),
}


@pytest.mark.parametrize(("error", "code"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("dialect", [OPENAI, OPEN_RESPONSES], ids=lambda dialect: dialect.name)
def test_an_error_event_precedes_the_failed_response(error: UnisonoError, code: str, dialect: Dialect) -> None:
    events = ResponseEvents(frame(dialect=dialect), GenerationReport(), new_id=ids(), clock=lambda: NOW)
    events_on_wire = parsed(
        [*events.first_events(), *events.write(final(0, "Hi")[:2]), *events.fail(error), events.last()]
    )
    assert names(events_on_wire)[-5:] == [
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "error",
        "failed",
    ]
    error_event = events_on_wire[-2]
    error_body = error_event["error"] if dialect is OPEN_RESPONSES else error_event
    assert (error_body["code"], error_body["message"], error_body["param"]) == (error.code, error.message, None)
    assert ("error" in error_event) == (dialect is OPEN_RESPONSES)
    assert events_on_wire[-1]["response"]["error"] == {"code": code, "message": error.message}
    assert [item.get("status") for item in fold(events_on_wire).output] == ["incomplete"]


def test_a_failure_after_the_last_engine_event_fails_the_response() -> None:
    events = ResponseEvents(frame(), GenerationReport(), new_id=ids(), clock=lambda: NOW)
    wire_events = [*events.first_events(), *events.write([*final(0, "Hi"), finished()])]
    wire_events += events.fail(BackendUnavailable("It could not be kept."))
    folded = fold(parsed([*wire_events, events.last()]))
    assert folded.response["status"] == "failed"
    assert folded.response["usage"]["output_tokens"] == 7


def test_a_queued_response_starts_with_status_queued() -> None:
    events = ResponseEvents(frame(), GenerationReport(), new_id=ids(), clock=lambda: NOW)
    events_on_wire = parsed([*events.first_events(queued=True), *events.write([finished()]), events.last()])
    assert names(events_on_wire) == ["created", "queued", "in_progress", "completed"]
    assert [event["response"]["status"] for event in events_on_wire] == ["queued", "queued", "in_progress", "completed"]
    assert fold(events_on_wire).ended


def test_a_refusal_is_a_refusal_part() -> None:
    events = ResponseEvents(frame(), GenerationReport(), new_id=ids(), clock=lambda: NOW)
    events_on_wire = parsed([*events.first_events(), *events.refuse("No."), *events.write([finished()]), events.last()])
    assert names(events_on_wire)[2:-1] == [
        *("output_item.added", "content_part.added", "refusal.delta", "refusal.done"),
        *("content_part.done", "output_item.done"),
    ]
    assert fold(events_on_wire).output[0]["content"] == [{"type": "refusal", "refusal": "No."}]


@pytest.mark.parametrize(
    ("began", "logprobs", "is_noted"),
    [(final(0, "Hello.")[:2], 0, True), (final(0, "Hello.")[:2], None, False), (reasoning(0, "Hm."), 0, False)],
    ids=["text", "no log probabilities requested", "only reasoning"],
)
def test_a_resumed_response_notes_missing_log_probabilities(
    began: list[engine_events.Event], logprobs: int | None, is_noted: bool
) -> None:
    events = ResponseEvents(frame(logprobs=logprobs), GenerationReport(), new_id=ids(), clock=lambda: NOW)
    events.resume(began, 5)
    events.write([*final(0, "Hello.")[2:], finished()] if is_noted or logprobs is None else [finished()])
    assert events.stored is not None
    notes = to_response(events.stored)["unisono"].get("notes", [])
    assert [note.startswith("top_logprobs: log probabilities are missing") for note in notes] == [True] * is_noted


def test_hidden_reasoning_has_item_events_without_text() -> None:
    response_frame = frame(show_reasoning=False, seal=lambda item: "sealed", summary_chars=600)
    events, _ = streamed([[*reasoning(0, "hm"), *final(1, "Hi"), finished()]], response_frame)
    assert names(events)[2:4] == ["output_item.added", "output_item.done"]
    assert "encrypted_content" not in events[2]["item"]
    assert events[3]["item"]["encrypted_content"] == "sealed"
    assert events[3]["item"]["content"] == []
    assert "hm" not in str(events)


THOUGHT = ["Count 2.", " Then", " add.\n", "Fin"]
SUMMARY_EVENTS = [
    *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
    *("reasoning_summary_part.added", "reasoning_summary_text.delta"),
    *("reasoning_text.delta", "reasoning_summary_text.delta", "reasoning_text.delta", "reasoning_summary_text.delta"),
    *("reasoning_summary_text.done", "reasoning_summary_part.done"),
    *("reasoning_text.done", "content_part.done", "output_item.done"),
]


@pytest.mark.parametrize("dialect", [OPENAI, OPEN_RESPONSES], ids=lambda dialect: dialect.name)
def test_a_summary_is_emitted_by_the_sentence_in_both_dialects(dialect: Dialect) -> None:
    stream = [*reasoning(0, *THOUGHT), *final(1, "Hi"), finished()]
    events, stored = streamed([[event] for event in stream], frame(summary_chars=600, dialect=dialect))
    item_events = [name.replace("reasoning.", "reasoning_text.") for name in names(events)[2:17]]
    assert item_events == SUMMARY_EVENTS
    summary_events = [event for event in events if "summary" in event["type"]]
    assert {(event["output_index"], event["summary_index"]) for event in summary_events} == {(0, 0)}
    deltas = [event["delta"] for event in summary_events if "delta" in event]
    assert deltas == ["Count 2.", " Then add.", "\nFin"]
    assert stored.output[0].wire["summary"] == [{"type": "summary_text", "text": "Count 2. Then add.\nFin"}]
    assert fold(events).output[0]["summary"] == stored.output[0].wire["summary"]


def test_an_interrupted_summary_has_whole_sentences_and_its_status() -> None:
    events = ResponseEvents(frame(summary_chars=600), GenerationReport(), new_id=ids(), clock=lambda: NOW)
    wire_events = [*events.write(reasoning(0, *THOUGHT)[:-1]), *events.cancel(), events.last()]
    folded = fold(parsed(wire_events))
    assert folded.output[0]["summary"] == [{"type": "summary_text", "text": "Count 2. Then add."}]
    [ended] = [event for event in parsed(wire_events) if event["type"] == "response.reasoning_summary_part.done"]
    assert ended["status"] == "incomplete"


def test_reasoning_without_a_sentence_has_no_summary() -> None:
    events, _ = streamed([[*reasoning(0, " \n"), finished()]], frame(summary_chars=600))
    assert fold(events).output[0]["summary"] == []
    assert not any("summary" in name for name in names(events))


def test_open_responses_has_its_own_event_and_item_names() -> None:
    stream = [*reasoning(0, "hm"), *call(1, 0, "free", '{"input":"ls"}'), finished()]
    body = request_of(tools=[{"type": "custom", "name": "free"}, {"type": "function", "name": "f"}])
    events, stored = streamed([stream], frame(body, dialect=OPEN_RESPONSES))
    assert "reasoning.delta" in names(events)
    assert not any("reasoning_text." in name for name in names(events))
    folded = fold(events)
    assert [item["type"] for item in folded.output] == ["reasoning", "unisono:custom_tool_call"]
    assert [tool["type"] for tool in folded.response["tools"]] == ["unisono:custom", "function"]
    assert "unisono:custom_tool_call_input.delta" in names(events)
    assert [item.wire["type"] for item in stored.output] == ["reasoning", "custom_tool_call"]


def test_the_output_is_stored_with_its_exact_tokens() -> None:
    reasoning_item, empty, preamble, called = (
        Reasoning(0),
        Reasoning(1),
        Text(2, Phase.COMMENTARY),
        ToolCall(3, 0, "c", "f"),
    )
    stream: list[engine_events.Event] = []
    for item, text in ((reasoning_item, "hm"), (empty, ""), (preamble, "Look."), (called, "{}")):
        stream += [Opened(item), Closed(item, text, (item.index + 1,))]
    _, stored = streamed([[*stream, finished()]], frame())
    expected: list[tuple[Item, ...]] = [
        (AssistantReasoning("hm", (1,)),),
        (AssistantReasoning("", (2,)), AssistantMessage("Look.", Phase.COMMENTARY, (3,))),
        (AssistantCall("c", "f", "{}", (4,)),),
    ]
    assert [item.meaning for item in stored.output] == expected


REQUIRED_FIELDS: dict[str, type | tuple[type, ...]] = {
    # field: required type
    "id": str,
    "object": str,
    "created_at": int,
    "status": str,
    "background": bool,
    "model": str,
    "output": list,
    "parallel_tool_calls": bool,
    "tool_choice": str,
    "tools": list,
    "temperature": float,
    "top_p": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "top_logprobs": int,
    "service_tier": str,
    "store": bool,
    "truncation": str,
    "text": dict,
    "reasoning": dict,
    "metadata": dict,
}
NULLABLE_FIELDS: dict[str, type] = {
    "completed_at": int,
    "error": dict,
    "incomplete_details": dict,
    "instructions": str,
    "max_output_tokens": int,
    "max_tool_calls": int,
    "previous_response_id": str,
    "conversation": dict,
    "prompt_cache_key": str,
    "safety_identifier": str,
    "usage": dict,
    "user": str,
}


@given(streams(), DIALECTS)
def test_every_field_of_a_strict_schema_is_present(stream: list[engine_events.Event], dialect: Dialect) -> None:
    body = request_of(tools=[{"type": "function", "name": "f"}])
    for event in streamed([stream], frame(body, dialect=dialect))[0]:
        if "response" not in event:
            continue
        response: dict[str, Any] = event["response"]
        assert all(isinstance(response[name], kind) for name, kind in REQUIRED_FIELDS.items())
        assert all(response[name] is None or isinstance(response[name], kind) for name, kind in NULLABLE_FIELDS.items())
        assert response["text"]["format"] == {"type": "text"}
        assert response["tools"][0].keys() >= {"type", "name", "description", "parameters", "strict"}
        for item in response["output"]:
            assert item.keys() >= {"id", "type"}
            assert ("status" in item) == (kind_of(item) not in ("mcp_list_tools", "mcp_approval_request"))
            assert item["type"] != "reasoning" or item["summary"] == []


def test_only_the_terminal_event_has_usage() -> None:
    events, _ = streamed([[*final(0, "Hi"), finished()]], frame())
    assert [event["response"]["usage"] for event in events[:2]] == [None, None]
    assert events[-1]["response"]["usage"] == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 18,
    }


def test_only_the_terminal_event_has_the_unisono_object() -> None:
    report = GenerationReport("vllm-1", 1, ["missing-end"])
    events, _ = streamed([[*final(0, "a"), finished()]], frame(notes=("seed: no effect",)), report)
    numbers = [number for number, event in enumerate(events) if "unisono" in event.get("response", {})]
    assert numbers == [len(events) - 1]
    expected = {"recoveries": ["missing-end"], "failovers": 1, "backend": "vllm-1", "notes": ["seed: no effect"]}
    assert events[-1]["response"]["unisono"] == expected


@given(st.text())
def test_any_text_is_encoded_correctly(text: str) -> None:
    folded = fold(streamed([[*reasoning(0, text), *final(1, text), *call(2, 0, "free", text), finished()]], frame())[0])
    texts = [item["content"][0]["text"] for item in folded.output if item["type"] != "custom_tool_call"]
    assert texts == ([text, text] if text else [text])
