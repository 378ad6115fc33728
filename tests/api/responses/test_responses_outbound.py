"""Events on the Responses wire: their order, their numbers, and that stream, whole and kept response say the same."""

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
from unisono.api.responses.outbound.response import ResponseFrame, to_response
from unisono.api.responses.outbound.stored_stream import replay_events
from unisono.core import events as made
from unisono.core.conversation import AssistantCall, AssistantMessage, AssistantReasoning, Item, Phase, ToolResult
from unisono.core.events import Closed, Delta, Opened, Reasoning, Repaired, Text, ToolCall
from unisono.core.generation import FinishReason
from unisono.core.state_store import Status
from unisono.engine.request import GenerationReport
from unisono.engine.server_tools.policy import OUTCOME_UNKNOWN
from unisono.errors import BackendOverloaded, BackendUnavailable, ContextTooLong, UnisonoError

TEXT_LIFE = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
TEXT_LIFE += ["content_part.done", "output_item.done"]
REASONING_LIFE = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"]
REASONING_LIFE += ["content_part.done", "output_item.done"]
REFUSAL_LIFE = [name.replace("output_text", "refusal") for name in TEXT_LIFE]
CALL_LIFE = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
CUSTOM_LIFE = ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"]


LIST_LIFE = ["output_item.added", "mcp_list_tools.in_progress", "mcp_list_tools.completed", "output_item.done"]
HOSTED_LIFE = ["output_item.added", "mcp_call.in_progress", "mcp_call_arguments.delta", "mcp_call_arguments.done"]
HOSTED_LIFE += ["mcp_call.completed", "output_item.done"]


def failing(life: list[str]) -> list[str]:
    return [name.replace(".completed", ".failed") for name in life]


def without_delta(life: list[str]) -> list[str]:
    return [name for name in life if not name.endswith(".delta")]


CASES: dict[str, tuple[list[made.Event], list[str], str]] = {
    # what the engine says: (events, names between the frame's, the last one)
    "an answer": ([*final(0, "Hi"), finished()], TEXT_LIFE, "completed"),
    "nothing at all": ([finished()], [], "completed"),
    "an answer that is not of its form": (
        [*reasoning(0, "hm"), *unfit(1, "No", "."), finished()],
        [*REASONING_LIFE, *REFUSAL_LIFE],
        "completed",
    ),
    "one that says nothing": ([*unfit(0), finished()], without_delta(REFUSAL_LIFE), "completed"),
    "an empty answer has its whole life": ([*final(0), finished()], without_delta(TEXT_LIFE), "completed"),
    "an item without deltas has its text": (
        [Opened(Text(0, Phase.FINAL)), Closed(Text(0, Phase.FINAL), "Hi"), finished()],
        TEXT_LIFE,
        "completed",
    ),
    "an empty thought is none": ([*reasoning(0, ""), *final(1, "Hi"), finished()], TEXT_LIFE, "completed"),
    "thought, then answer": (
        [*reasoning(0, "hm"), *final(1, "Hi"), finished()],
        [*REASONING_LIFE, *TEXT_LIFE],
        "completed",
    ),
    "a preamble and a call": (
        [*commentary(0, "Look."), *call(1, 0, "f", '{"a"', ":1}"), finished()],
        [*TEXT_LIFE, *CALL_LIFE],
        "completed",
    ),
    "a call without arguments": ([*call(0, 0, "f"), finished()], without_delta(CALL_LIFE), "completed"),
    "free text": ([*call(0, 0, "free", '{"input":"ls"}'), finished()], CUSTOM_LIFE, "completed"),
    "a cut call is no call": ([*call(0, 0, "f", '{"a', complete=False), finished(cut_call=True)], [], "incomplete"),
    "the budget is spent": (
        [
            Opened(Text(0, Phase.FINAL)),
            Delta(Text(0, Phase.FINAL), "Hi"),
            Closed(Text(0, Phase.FINAL), "Hi", complete=False),
            finished(FinishReason.LENGTH),
        ],
        TEXT_LIFE,
        "incomplete",
    ),
    "a call and then the budget": (
        [*call(0, 0, "f", "{}"), finished(FinishReason.LENGTH)],
        CALL_LIFE,
        "completed",
    ),
    "tools, a call of one, and an answer": (
        [*listing(0, "find"), *hosted(0, '{"a"', ":1}"), *final(1, "Hi"), finished()],
        [*LIST_LIFE, *HOSTED_LIFE, *TEXT_LIFE],
        "completed",
    ),
    "no tools": ([*listing(0, error="It is gone."), finished()], failing(LIST_LIFE), "completed"),
    "a call that failed": ([*hosted(0, "{}", said="no", error=True), finished()], failing(HOSTED_LIFE), "completed"),
    "a call without arguments of its own": ([*hosted(0), finished()], without_delta(HOSTED_LIFE), "completed"),
    "a call that was approved": ([*hosted(0, "{}", approval="mcpr_1"), finished()], HOSTED_LIFE, "completed"),
    "a call that is to be approved": (
        [*request(0, '{"a"', ":1}"), finished()],
        ["output_item.added", "output_item.done"],
        "completed",
    ),
    "tools of both": (
        [*hosted(0, "{}"), *call(1, 0, "f", "{}"), finished()],
        [*HOSTED_LIFE, *CALL_LIFE],
        "completed",
    ),
    "repairs are no events": ([Repaired("x", 1), *final(0, "a"), finished()], TEXT_LIFE, "completed"),
}


def names(events: list[Event]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


@pytest.mark.parametrize(("said", "life", "last"), CASES.values(), ids=CASES)
def test_events_come_in_the_order_of_the_catalogue(said: list[made.Event], life: list[str], last: str) -> None:
    events, stored = streamed([said], frame())
    assert names(events) == ["created", "in_progress", *life, last]
    folded = fold(events)
    assert folded.response == to_response(stored)
    assert folded.response["status"] == last


@pytest.mark.parametrize(("said", "life", "last"), CASES.values(), ids=CASES)
def test_the_whole_answer_is_what_the_stream_adds_up_to(said: list[made.Event], life: list[str], last: str) -> None:
    same(said, frame())


def same(said: list[made.Event], shown: ResponseFrame) -> None:
    report = GenerationReport("vllm-1", 1, ["missing-end"])
    events, kept = streamed([[event] for event in said], shown, report)
    quiet = ResponseEvents(shown, report, new_id=ids(), clock=lambda: NOW, should_emit=False)
    assert quiet.write(said) == []
    whole = quiet.stored
    assert whole is not None
    assert kept == whole
    assert fold(events).response == to_response(whole, shown.dialect)
    assert fold(parsed(replay_events(whole, shown.dialect))).response == to_response(whole, shown.dialect)


HOSTED: dict[str, tuple[list[made.Event], list[Item], dict[str, Any]]] = {
    # what the engine says: what is said to the model from now on, and what is shown
    "a call": (
        hosted(0, '{"a":1}', said="found"),
        [
            AssistantCall("call_h0", "docs__find", '{"a":1}', (200006, 0)),
            ToolResult("call_h0", "docs__find", "found"),
        ],
        {
            "id": "mcp_0",
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
    "a call that was approved says its result alone": (
        hosted(0, "{}", said="found", approval="mcpr_1"),
        [ToolResult("call_h0", "docs__find", "found")],
        {"status": "completed", "approval_request_id": "mcpr_1", "output": "found"},
    ),
    "a request says the call": (
        request(0, "{}"),
        [AssistantCall("call_h0", "docs__find", "{}", (200006, 0))],
        {"id": "mcpr_0", "type": "mcp_approval_request", "arguments": "{}", "name": "find", "server_label": "docs"},
    ),
    "a list says nothing": (
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
    "a call that was broken off": (
        hosted(0, "{}")[:-1],
        [
            AssistantCall("call_h0", "docs__find", "{}", (200006, 0)),
            ToolResult("call_h0", "docs__find", OUTCOME_UNKNOWN),
        ],
        {"status": "incomplete", "output": None, "error": None},
    ),
}


@pytest.mark.parametrize(("events", "said", "shown"), HOSTED.values(), ids=HOSTED)
def test_what_is_kept_of_a_hosted_tool(events: list[made.Event], said: list[Item], shown: dict[str, Any]) -> None:
    telling = ResponseEvents(frame(), GenerationReport(), new_id=ids(), clock=lambda: NOW)
    out = [*telling.write(events), *telling.cancel(), telling.last()]
    fold(parsed(out))
    assert telling.stored is not None
    [item] = telling.stored.output
    assert list(item.meaning) == said
    assert item.wire.items() >= shown.items()
    assert telling.acted is (item.wire["type"] == "mcp_call")


def test_hosted_tools_have_names_of_our_own_in_open_responses() -> None:
    said = [*listing(0, "find"), *hosted(0, "{}"), *request(1, "{}"), finished()]
    told = streamed([said], frame(dialect=OPEN_RESPONSES))[0]
    own = [event["type"] for event in told if "mcp" in event["type"]]
    assert own == [
        "unisono:mcp_list_tools.in_progress",
        "unisono:mcp_list_tools.completed",
        "unisono:mcp_call.in_progress",
        "unisono:mcp_call_arguments.delta",
        "unisono:mcp_call_arguments.done",
        "unisono:mcp_call.completed",
    ]
    kinds = [item["type"] for item in fold(told).output]
    assert kinds == ["unisono:mcp_list_tools", "unisono:mcp_call", "unisono:mcp_approval_request"]


TEXTS = st.lists(st.text(max_size=6), max_size=3)


@st.composite
def streams(draw: st.DrawFn) -> list[made.Event]:
    """Whatever an engine may say: also messages cut in the middle, thoughts without a word and calls that are cut."""
    events: list[made.Event] = []
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
            life = call(index, calls, name, *pieces, complete=complete)
            calls, cut = calls + 1, cut + (not complete)
        else:
            life = {"reasoning": reasoning, "final": final, "commentary": commentary}[kind](index, *pieces)
        [*begun, closed] = life
        assert isinstance(closed, Closed)
        tokens = (200006, index) if complete and draw(st.booleans()) else ()
        events += [*begun, Closed(closed.item, closed.text, tokens, complete)]
        if draw(st.booleans()):
            events.append(Repaired("rule", index))
    return [*events, finished(draw(st.sampled_from(FinishReason)), cut_call=bool(cut))]


DIALECTS = st.sampled_from([OPENAI, OPEN_RESPONSES])


@given(streams(), DIALECTS, st.booleans(), st.booleans())
def test_any_stream_folds_to_the_whole_answer(
    said: list[made.Event], dialect: Dialect, shows: bool, seals: bool
) -> None:
    same(said, frame(dialect=dialect, show_reasoning=shows, seal=(lambda item: f"sealed {item!r}") if seals else None))


@given(streams(), st.lists(st.integers(0, 60), max_size=5))
def test_cutting_the_batches_anywhere_changes_no_response(said: list[made.Event], cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(said)]
    batches = [said[start:stop] for start, stop in pairwise(places) if said[start:stop]]
    assert streamed(batches, frame())[1] == streamed([said], frame())[1]


@given(streams())
def test_calls_that_are_shown_early_still_make_a_sound_stream(said: list[made.Event]) -> None:
    events, kept = streamed([said], frame(hold_calls=False))
    folded = fold(events)
    assert folded.response == to_response(kept)
    cut = any(item.get("status") == "incomplete" and item["type"] == "function_call" for item in folded.output)
    assert not cut or kept.status is Status.INCOMPLETE


@given(streams(), st.integers(0, 60), st.sampled_from(["fail", "cancel"]))
def test_a_stream_that_breaks_anywhere_is_closed_properly(said: list[made.Event], where: int, how: str) -> None:
    events = ResponseEvents(frame(), GenerationReport(), new_id=ids(), clock=lambda: NOW)
    out = events.write(said[: min(where, len(said) - 1)]) if where else []
    out += events.fail(BackendUnavailable("It is gone.")) if how == "fail" else events.cancel()
    folded = fold(parsed([*out, events.last()]))
    assert folded.response["status"] == ("failed" if how == "fail" else "cancelled")
    assert (folded.error is not None) == (how == "fail")
    assert [item.get("status") for item in folded.output[:-1]].count("incomplete") == 0


@given(streams())
def test_only_the_last_item_is_incomplete(said: list[made.Event]) -> None:
    output = fold(streamed([said], frame())[0]).output
    assert not any(item.get("status") == "incomplete" for item in output[:-1])


def test_ids_begin_as_their_kinds_do_and_are_kept() -> None:
    said = [*reasoning(0, "hm"), *commentary(1, "Look."), *call(2, 0, "f", "{}"), *call(3, 1, "free", "x")]
    events, kept = streamed([[*said, finished()]], frame())
    assert [item.id for item in kept.output] == ["rs_0", "msg_1", "fc_2", "ctc_3"]
    assert [item["id"] for item in fold(events).output] == [item.id for item in kept.output]


def test_items_have_the_shape_of_the_catalogue() -> None:
    said = [*reasoning(0, "hm"), *commentary(1, "Look."), *call(2, 0, "files__read", "{}"), *call(3, 1, "free", "x")]
    events, _ = streamed([[*said, finished()]], frame())
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


def test_deltas_of_one_batch_are_one_event_per_item() -> None:
    first, second = Text(0, Phase.COMMENTARY), Text(1, Phase.FINAL)
    batch: list[made.Event] = [Opened(first), Delta(first, "a"), Delta(first, "b"), Closed(first, "ab")]
    batch += [Opened(second), Delta(second, "c"), Delta(second, "d"), Closed(second, "cd"), finished()]
    events, _ = streamed([batch], frame())
    assert [event["delta"] for event in events if "delta" in event] == ["ab", "cd"]
    assert [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"] == [[], []]


def test_a_cut_message_the_model_went_on_from_is_complete() -> None:
    mended = [Opened(Text(0, Phase.COMMENTARY)), Closed(Text(0, Phase.COMMENTARY), "Lo", complete=False)]
    events, kept = streamed([[*mended, *final(1, "Hi"), finished(FinishReason.LENGTH)]], frame())
    assert [item.get("status") for item in fold(events).output] == ["completed", "completed"]
    assert kept.status is Status.INCOMPLETE


def test_an_incomplete_answer_says_why() -> None:
    item = Text(0, Phase.FINAL)
    said = [Opened(item), Delta(item, "Hi"), Closed(item, "Hi", complete=False), finished(FinishReason.LENGTH)]
    folded = fold(streamed([said], frame())[0])
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
def test_an_error_is_told_and_then_the_response_failed(error: UnisonoError, code: str, dialect: Dialect) -> None:
    events = ResponseEvents(frame(dialect=dialect), GenerationReport(), new_id=ids(), clock=lambda: NOW)
    said = parsed([*events.first_events(), *events.write(final(0, "Hi")[:2]), *events.fail(error), events.last()])
    assert names(said)[-5:] == ["output_text.done", "content_part.done", "output_item.done", "error", "failed"]
    told = said[-2]
    inner = told["error"] if dialect is OPEN_RESPONSES else told
    assert (inner["code"], inner["message"], inner["param"]) == (error.code, error.message, None)
    assert ("error" in told) == (dialect is OPEN_RESPONSES)
    assert said[-1]["response"]["error"] == {"code": code, "message": error.message}
    assert [item.get("status") for item in fold(said).output] == ["incomplete"]


def test_a_failure_after_the_end_takes_the_place_of_the_end() -> None:
    events = ResponseEvents(frame(), GenerationReport(), new_id=ids(), clock=lambda: NOW)
    out = [*events.first_events(), *events.write([*final(0, "Hi"), finished()])]
    out += events.fail(BackendUnavailable("It could not be kept."))
    folded = fold(parsed([*out, events.last()]))
    assert folded.response["status"] == "failed"
    assert folded.response["usage"]["output_tokens"] == 7


def test_what_waits_begins_as_queued() -> None:
    events = ResponseEvents(frame(), GenerationReport(), new_id=ids(), clock=lambda: NOW)
    said = parsed([*events.first_events(queued=True), *events.write([finished()]), events.last()])
    assert names(said) == ["created", "queued", "in_progress", "completed"]
    assert [event["response"]["status"] for event in said] == ["queued", "queued", "in_progress", "completed"]
    assert fold(said).ended


def test_a_refusal_has_a_part_of_its_own() -> None:
    events = ResponseEvents(frame(), GenerationReport(), new_id=ids(), clock=lambda: NOW)
    said = parsed([*events.first_events(), *events.refuse("No."), *events.write([finished()]), events.last()])
    assert names(said)[2:-1] == [
        *("output_item.added", "content_part.added", "refusal.delta", "refusal.done"),
        *("content_part.done", "output_item.done"),
    ]
    assert fold(said).output[0]["content"] == [{"type": "refusal", "refusal": "No."}]


def test_hidden_thoughts_have_a_life_without_words() -> None:
    shown = frame(show_reasoning=False, seal=lambda item: "sealed")
    events, _ = streamed([[*reasoning(0, "hm"), *final(1, "Hi"), finished()]], shown)
    assert names(events)[2:4] == ["output_item.added", "output_item.done"]
    assert "encrypted_content" not in events[2]["item"]
    assert events[3]["item"]["encrypted_content"] == "sealed"
    assert events[3]["item"]["content"] == []
    assert "hm" not in str(events)


def test_open_responses_has_its_own_names() -> None:
    said = [*reasoning(0, "hm"), *call(1, 0, "free", '{"input":"ls"}'), finished()]
    asked = request_of(tools=[{"type": "custom", "name": "free"}, {"type": "function", "name": "f"}])
    events, kept = streamed([said], frame(asked, dialect=OPEN_RESPONSES))
    assert "reasoning.delta" in names(events)
    assert not any("reasoning_text." in name for name in names(events))
    folded = fold(events)
    assert [item["type"] for item in folded.output] == ["reasoning", "unisono:custom_tool_call"]
    assert [tool["type"] for tool in folded.response["tools"]] == ["unisono:custom", "function"]
    assert "unisono:custom_tool_call_input.delta" in names(events)
    assert [item.wire["type"] for item in kept.output] == ["reasoning", "custom_tool_call"]


def test_the_answer_is_kept_with_the_exact_tokens() -> None:
    thought, empty, preamble, called = Reasoning(0), Reasoning(1), Text(2, Phase.COMMENTARY), ToolCall(3, 0, "c", "f")
    said: list[made.Event] = []
    for item, text in ((thought, "hm"), (empty, ""), (preamble, "Look."), (called, "{}")):
        said += [Opened(item), Closed(item, text, (item.index + 1,))]
    _, kept = streamed([[*said, finished()]], frame())
    expected: list[tuple[Item, ...]] = [
        (AssistantReasoning("hm", (1,)),),
        (AssistantReasoning("", (2,)), AssistantMessage("Look.", Phase.COMMENTARY, (3,))),
        (AssistantCall("c", "f", "{}", (4,)),),
    ]
    assert [item.meaning for item in kept.output] == expected


STRICT: dict[str, type | tuple[type, ...]] = {
    # every field that a strict schema wants, and what it must be
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
NULLABLE: dict[str, type] = {
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
def test_every_field_a_strict_schema_wants_is_there(said: list[made.Event], dialect: Dialect) -> None:
    asked = request_of(tools=[{"type": "function", "name": "f"}])
    for event in streamed([said], frame(asked, dialect=dialect))[0]:
        if "response" not in event:
            continue
        response: dict[str, Any] = event["response"]
        assert all(isinstance(response[name], kind) for name, kind in STRICT.items())
        assert all(response[name] is None or isinstance(response[name], kind) for name, kind in NULLABLE.items())
        assert response["text"]["format"] == {"type": "text"}
        assert response["tools"][0].keys() >= {"type", "name", "description", "parameters", "strict"}
        for item in response["output"]:
            assert item.keys() >= {"id", "type"}
            assert ("status" in item) == (kind_of(item) not in ("mcp_list_tools", "mcp_approval_request"))
            assert item["type"] != "reasoning" or item["summary"] == []


def test_usage_comes_with_the_end_only() -> None:
    events, _ = streamed([[*final(0, "Hi"), finished()]], frame())
    assert [event["response"]["usage"] for event in events[:2]] == [None, None]
    assert events[-1]["response"]["usage"] == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 18,
    }


def test_only_the_last_event_says_how_the_answer_came_to_be() -> None:
    report = GenerationReport("vllm-1", 1, ["missing-end"])
    events, _ = streamed([[*final(0, "a"), finished()]], frame(notes=("seed: no effect",)), report)
    told = [number for number, event in enumerate(events) if "unisono" in event.get("response", {})]
    assert told == [len(events) - 1]
    about = {"recoveries": ["missing-end"], "failovers": 1, "backend": "vllm-1", "notes": ["seed: no effect"]}
    assert events[-1]["response"]["unisono"] == about


@given(st.text())
def test_any_text_survives_the_template(text: str) -> None:
    folded = fold(streamed([[*reasoning(0, text), *final(1, text), *call(2, 0, "free", text), finished()]], frame())[0])
    texts = [item["content"][0]["text"] for item in folded.output if item["type"] != "custom_tool_call"]
    assert texts == ([text, text] if text else [text])
