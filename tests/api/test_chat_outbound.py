"""Chat responses from events: order of chunks, emitted fields, equality of both forms."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.asgi import events_of
from tests.api.folding import fold
from tests.api.scripted import USAGE, call, commentary, final, finished, reasoning, unfit
from unisono.api.chat.outbound import ChatFrame, ChatStreamChunks, to_completion, to_usage
from unisono.api.client_toolbox import CallForm, Toolbox
from unisono.api.collected_answer import collect
from unisono.api.request_options import ReasoningField
from unisono.core.conversation import Phase
from unisono.core.events import Closed, Delta, Event, Opened, Reasoning, Repaired, Text, ToolCall
from unisono.core.generation import FinishReason, Usage
from unisono.engine.request import GenerationReport

FORMS = {"free": CallForm.CUSTOM, "old": CallForm.LEGACY}


def frame(**changes: Any) -> ChatFrame:
    return ChatFrame("chatcmpl-1", 1700000000, "gpt-oss-20b", toolbox=Toolbox(forms=FORMS), **changes)


def streamed(
    batches: Sequence[list[Event]], chat_frame: ChatFrame, report: GenerationReport | None = None
) -> list[Any]:
    chunks = ChatStreamChunks(chat_frame, [report or GenerationReport()])
    return events_of(b"".join(chunks.write(0, batch) for batch in batches))


def deltas(chunks: list[Any]) -> list[Any]:
    return [choice["delta"] for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]


def function(index: int, name: str, call_id: str) -> dict[str, Any]:
    return {
        "tool_calls": [{"index": index, "type": "function", "id": call_id, "function": {"name": name, "arguments": ""}}]
    }


def arguments(index: int, text: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


START = {"role": "assistant", "content": ""}
CASES: dict[str, tuple[list[Event], list[Any], str]] = {
    "an answer": ([*final(0, "Hi"), finished()], [START, {"content": "Hi"}, {}], "stop"),
    "reasoning, then answer": (
        [*reasoning(0, "hm"), *final(1, "Hi"), finished()],
        [START, {"reasoning": "hm", "reasoning_content": "hm"}, {"content": "Hi"}, {}],
        "stop",
    ),
    "no output": ([finished()], [START, {}], "stop"),
    "empty deltas are not emitted": ([*final(0, "", "a", ""), finished()], [START, {"content": "a"}, {}], "stop"),
    "a blank line separates two messages": (
        [*commentary(0, "Look."), *final(1, "Do", "ne"), *final(2, "."), finished()],
        [START, {"content": "Look."}, {"content": "\n\nDone"}, {"content": "\n\n."}, {}],
        "stop",
    ),
    "an empty message needs no separator": (
        [*commentary(0, ""), *final(1, "Do", "ne"), *final(2, ""), finished()],
        [START, {"content": "Done"}, {}],
        "stop",
    ),
    "a blank line separates two messages around reasoning and a call": (
        [*commentary(0, "Look."), *reasoning(1, "hm"), *call(2, 0, "f", "{}"), *final(3, "Done"), finished()],
        [
            START,
            {"content": "Look."},
            {"reasoning": "hm", "reasoning_content": "hm"},
            function(0, "f", "call_0"),
            arguments(0, "{}"),
            {"content": "\n\nDone"},
            {},
        ],
        "tool_calls",
    ),
    "an answer of the wrong form is a refusal": (
        [*reasoning(0, "hm"), *unfit(1, "No", "."), finished()],
        [START, {"reasoning": "hm", "reasoning_content": "hm"}, {"refusal": "No."}, {}],
        "stop",
    ),
    "a preamble before a refusal stays content": (
        [*commentary(0, "Look."), *unfit(1, "No."), finished()],
        [START, {"content": "Look."}, {"refusal": "No."}, {}],
        "stop",
    ),
    "an empty refusal is not emitted": ([*unfit(0), finished()], [START, {}], "stop"),
    "a call": (
        [*call(0, 0, "f", '{"a"', ":1}"), finished()],
        [START, function(0, "f", "call_0"), arguments(0, '{"a":1}'), {}],
        "tool_calls",
    ),
    "a call without arguments": ([*call(0, 0, "f"), finished()], [START, function(0, "f", "call_0"), {}], "tool_calls"),
    "two calls": (
        [*call(0, 0, "f", "{}"), *call(1, 1, "g", "{}"), finished()],
        [START, function(0, "f", "call_0"), arguments(0, "{}"), function(1, "g", "call_1"), arguments(1, "{}"), {}],
        "tool_calls",
    ),
    "an incomplete call is not emitted": (
        [*call(0, 0, "f", '{"a', complete=False), finished(cut_call=True)],
        [START, {}],
        "length",
    ),
    "indexes count emitted calls only": (
        [*call(0, 0, "f", "{", complete=False), *call(1, 1, "g", "{}"), finished()],
        [START, function(0, "g", "call_1"), arguments(0, "{}"), {}],
        "tool_calls",
    ),
    "token limit": ([*final(0, "Hi"), finished(FinishReason.LENGTH)], [START, {"content": "Hi"}, {}], "length"),
    "a call, then the token limit": (
        [*call(0, 0, "f", "{}"), finished(FinishReason.LENGTH)],
        [START, function(0, "f", "call_0"), arguments(0, "{}"), {}],
        "tool_calls",
    ),
    "custom tool call": (
        [*call(0, 0, "free", "ls -l"), finished()],
        [
            START,
            {"tool_calls": [{"index": 0, "type": "custom", "id": "call_0", "custom": {"name": "free", "input": ""}}]},
            {"tool_calls": [{"index": 0, "custom": {"input": "ls -l"}}]},
            {},
        ],
        "tool_calls",
    ),
    "the legacy form emits only the first call": (
        [*call(0, 0, "old", "{}"), *call(1, 1, "old", "{}"), finished()],
        [
            START,
            {"function_call": {"name": "old", "arguments": ""}},
            {"function_call": {"arguments": "{}"}},
            {},
        ],
        "function_call",
    ),
    "repairs are not emitted": (
        [Repaired("x", 1), *final(0, "a"), finished()],
        [START, {"content": "a"}, {}],
        "stop",
    ),
}


@pytest.mark.parametrize(("events", "expected", "reason"), CASES.values(), ids=CASES)
def test_chunks_are_emitted_in_the_expected_order(events: list[Event], expected: list[Any], reason: str) -> None:
    chunks = streamed([events], frame())
    assert deltas(chunks) == expected
    assert chunks[-1] == "[DONE]"
    last = chunks[-2]
    assert last["choices"][0]["finish_reason"] == reason
    assert last["choices"][0]["delta"] == {}


@pytest.mark.parametrize(("events", "expected", "reason"), CASES.values(), ids=CASES)
def test_completion_and_stream_are_equal(events: list[Event], expected: list[Any], reason: str) -> None:
    assert_both_forms_equal(events, frame())


def assert_both_forms_equal(events: list[Event], chat_frame: ChatFrame) -> None:
    [choice] = to_completion([collect(events)], [GenerationReport()], chat_frame)["choices"]
    [folded] = fold(streamed([[event] for event in events], chat_frame))
    message = choice["message"] | {"content": choice["message"]["content"] or ""}
    assert message.pop("annotations") == []
    refusal = message.pop("refusal")
    assert folded["message"].pop("refusal", None) == refusal
    assert refusal != ""
    assert folded["message"] == message
    assert folded["finish_reason"] == choice["finish_reason"]


NAMES = st.sampled_from(["f", "free", "old"])
TEXTS = st.lists(st.text(max_size=6), max_size=3)


@st.composite
def streams(draw: st.DrawFn) -> list[Event]:
    events: list[Event] = []
    calls = cut = 0
    for index in range(draw(st.integers(0, 6))):
        kind = draw(st.integers(0, 5))
        pieces = draw(TEXTS)
        if kind < 4:
            events += (reasoning, final, commentary, unfit)[kind](index, *pieces)
        else:
            complete = kind == 4
            events += call(index, calls, draw(NAMES), *pieces, complete=complete)
            calls, cut = calls + 1, cut + (not complete)
        if draw(st.booleans()):
            events.append(Repaired("rule", index))
    return [*events, finished(draw(st.sampled_from(FinishReason)), cut_call=bool(cut))]


@given(streams(), st.sampled_from(ReasoningField))
def test_any_stream_folds_to_the_completion(events: list[Event], field: ReasoningField) -> None:
    assert_both_forms_equal(events, frame(reasoning=field))


@given(streams(), st.lists(st.integers(0, 60), max_size=5))
def test_batch_boundaries_do_not_change_the_message(events: list[Event], cuts: list[int]) -> None:
    boundaries = [0, *sorted(cuts), len(events)]
    batches = [events[start:stop] for start, stop in pairwise(boundaries) if events[start:stop]]
    assert fold(streamed(batches, frame())) == fold(streamed([events], frame()))


@given(streams())
def test_the_finish_reason_matches_the_calls(events: list[Event]) -> None:
    chunks = streamed([events], frame(include_usage=True))
    [choice] = fold(chunks)
    message = choice["message"]
    assert (choice["finish_reason"] == "tool_calls") == bool(message.get("tool_calls"))
    assert (choice["finish_reason"] == "function_call") == ("function_call" in message)
    for chunk in chunks[:-1]:
        for chunk_choice in chunk["choices"]:
            assert chunk_choice["finish_reason"] is None or chunk_choice["delta"] == {}
    ids = [tool_call["id"] for tool_call in message.get("tool_calls", [])]
    assert len(ids) == len(set(ids))


def test_deltas_of_one_batch_are_one_chunk_per_item() -> None:
    first, second = Text(0, Phase.COMMENTARY), Text(1, Phase.FINAL)
    batch: list[Event] = [Opened(first), Delta(first, "a"), Delta(first, "b"), Closed(first, "ab")]
    batch += [Opened(second), Delta(second, "c"), Delta(second, "d")]
    assert deltas(streamed([batch], frame())) == [START, {"content": "ab"}, {"content": "\n\ncd"}]


@pytest.mark.parametrize(
    ("field", "names"),
    [
        (ReasoningField.BOTH, {"reasoning", "reasoning_content"}),
        (ReasoningField.REASONING, {"reasoning"}),
        (ReasoningField.REASONING_CONTENT, {"reasoning_content"}),
        (ReasoningField.NONE, set()),
    ],
)
def test_reasoning_uses_the_configured_field_names(field: ReasoningField, names: set[str]) -> None:
    events = [*reasoning(0, "hm"), *final(1, "a"), finished()]
    [folded] = fold(streamed([events], frame(reasoning=field)))
    assert {name for name, value in folded["message"].items() if value == "hm"} == names
    [choice] = to_completion([collect(events)], [GenerationReport()], frame(reasoning=field))["choices"]
    assert {name for name, value in choice["message"].items() if value == "hm"} == names


def test_all_chunks_have_the_same_id_and_metadata() -> None:
    chunks = streamed(
        [[*reasoning(0, "hm"), *final(1, "a"), *call(2, 0, "f", "{}"), finished()]], frame(include_usage=True)
    )
    heads = [{name: chunk[name] for name in ("id", "object", "created", "model")} for chunk in chunks[:-1]]
    assert heads[0] == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "gpt-oss-20b",
    }
    assert all(head == heads[0] for head in heads)


def test_usage_is_a_separate_chunk_and_only_on_request() -> None:
    events = [*final(0, "a"), finished()]
    with_usage = streamed([events], frame(include_usage=True))
    assert [chunk["usage"] for chunk in with_usage[:-2]] == [None] * (len(with_usage) - 2)
    assert with_usage[-2]["choices"] == []
    assert with_usage[-2]["usage"] == {
        "prompt_tokens": 11,
        "completion_tokens": 7,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    assert all("usage" not in chunk for chunk in streamed([events], frame())[:-1])


@pytest.mark.parametrize("include_usage", [True, False])
def test_only_the_last_chunk_has_the_unisono_field(include_usage: bool) -> None:
    report = GenerationReport("vllm-1", 1, ["missing-end", "trailing-stop"])
    chat_frame = frame(include_usage=include_usage, notes=("metadata: no effect",))
    chunks = streamed([[*final(0, "a"), finished()]], chat_frame, report)
    assert [index for index, chunk in enumerate(chunks[:-1]) if "unisono" in chunk] == [len(chunks) - 2]
    expected = {
        "recoveries": ["missing-end", "trailing-stop"],
        "failovers": 1,
        "backend": "vllm-1",
        "notes": ["metadata: no effect"],
    }
    assert chunks[-2]["unisono"] == expected
    assert to_completion([collect([finished()])], [report], chat_frame)["unisono"] == expected


def test_choices_end_separately_and_the_stream_once() -> None:
    chunks = ChatStreamChunks(frame(), [GenerationReport("a", 0, ["x"]), GenerationReport("b", 1, ["x", "y"])])
    first = events_of(chunks.write(1, [*final(0, "one"), finished()]))
    rest = events_of(chunks.write(0, [*final(0, "two"), finished(FinishReason.LENGTH)]))
    # The second choice is the first to emit. openai-python's stream helper fails if a choice index is skipped.
    assert [(chunk["choices"][0]["index"], chunk["choices"][0]["delta"].get("role")) for chunk in first[:2]] == [
        (0, "assistant"),
        (1, "assistant"),
    ]
    assert "[DONE]" not in first
    assert rest[-1] == "[DONE]"
    assert rest[-2]["unisono"] == {"recoveries": ["x", "y"], "failovers": 1, "backend": "a, b"}
    folded = fold(first + rest)
    assert [(choice["message"]["content"], choice["finish_reason"]) for choice in folded] == [
        ("two", "length"),
        ("one", "stop"),
    ]


def test_prompt_tokens_of_choices_are_counted_once() -> None:
    usage = to_usage([Usage(10, 4, 2, 6), Usage(10, 5, 1, 10)])
    assert usage["prompt_tokens"] == 10
    assert usage["completion_tokens"] == 9
    assert usage["total_tokens"] == 19
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_unbuffered_calls_are_emitted_while_they_are_generated() -> None:
    item = ToolCall(0, 0, "call_0", "f")
    chat_frame = frame(hold_calls=False)
    chunks = ChatStreamChunks(chat_frame, [GenerationReport()])
    batches: list[list[Event]] = [[Opened(item)], [Delta(item, '{"a"')], [Delta(item, ":1}"), Closed(item, '{"a":1}')]]
    emitted = [deltas(events_of(chunks.write(0, batch))) for batch in batches]
    assert emitted == [[START, function(0, "f", "call_0")], [arguments(0, '{"a"')], [arguments(0, ":1}")]]
    assert events_of(chunks.write(0, [finished()]))[0]["choices"][0]["finish_reason"] == "tool_calls"


def test_an_unbuffered_incomplete_call_finishes_with_length() -> None:
    events = [*call(0, 0, "f", '{"a', complete=False), finished(cut_call=True)]
    assert streamed([events], frame(hold_calls=False))[-2]["choices"][0]["finish_reason"] == "length"


@given(st.text())
def test_any_text_survives_serialization(text: str) -> None:
    item = Reasoning(0)
    [folded] = fold(streamed([[Opened(item), Delta(item, text)], [*final(1, text), finished()]], frame()))
    assert folded["message"]["content"] == text
    assert folded["message"].get("reasoning", "") == text


def test_a_completion_has_all_fields() -> None:
    body = to_completion(
        [collect([*call(0, 0, "f", "{}"), finished()])], [GenerationReport()], frame(fingerprint="fp_1")
    )
    assert body["object"] == "chat.completion"
    assert body["system_fingerprint"] == "fp_1"
    assert body["usage"]["total_tokens"] == USAGE.prompt_tokens + USAGE.completion_tokens
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "annotations": [],
                "tool_calls": [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
        }
    ]


def test_a_refusal_has_no_content() -> None:
    report = GenerationReport(unmet="The answer does not have the form that was asked for.")
    body = to_completion([collect([*unfit(0, "No."), finished()])], [report], frame())
    message = body["choices"][0]["message"]
    assert (message["content"], message["refusal"], body["choices"][0]["finish_reason"]) == (None, "No.", "stop")
    assert body["unisono"]["unmet"] == report.unmet
    last = streamed([[*unfit(0, "No."), finished()]], frame(), report)[-2]
    assert last["unisono"]["unmet"] == report.unmet
