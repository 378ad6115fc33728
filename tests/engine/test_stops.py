"""Stop strings end visible text at the same character however the stream is split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.conversation import Phase
from unisono.core.events import Closed, Delta, Event, Opened, Reasoning, Text, ToolCall
from unisono.engine.interventions.stop_strings import StopStrings

ANSWER = Text(0, Phase.FINAL)


def text_events(item: Text | Reasoning | ToolCall, *texts: str) -> list[Event]:
    return [Opened(item), *(Delta(item, text) for text in texts if text), Closed(item, "".join(texts))]


CASES: dict[str, tuple[tuple[str, ...], str, str, str | None]] = {
    "stop string in the middle": (("END",), "one END two", "one ", "END"),
    "stop string at the beginning": (("one",), "one two", "", "one"),
    "no match": (("END",), "one EN D", "one EN D", None),
    "partial match at the end": (("END",), "one EN", "one EN", None),
    "first of several stop strings": (("two", "one"), "one two", "", "one"),
    "first complete match": (("ab", "abc", "xabcd"), "xabcd", "x", "ab"),
    "longest of two matches with the same end": (("b", "ab"), "xabcd", "x", "ab"),
    "overlapping partial matches": (("aab",), "aaab!", "a", "aab"),
    "white space": (("\n\n",), "a\nb\n\nc", "a\nb", "\n\n"),
    "marker as text": (("<|end|>",), "a <|end|> b", "a ", "<|end|>"),
    "non-ASCII text": (("語。",), "日本語。はい", "日本", "語。"),
}


@pytest.mark.parametrize(("stops", "text", "expected", "matched"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_text_ends_before_the_stop_string(
    stops: tuple[str, ...], text: str, expected: str, matched: str | None, size: int
) -> None:
    matcher = StopStrings(stops)
    events: list[Event] = []
    for event in text_events(ANSWER, *(text[at : at + size] for at in range(0, len(text), size))):
        events += matcher.filter([event])
    assert matcher.matched == matched
    assert "".join(event.text for event in events if isinstance(event, Delta)) == expected
    assert isinstance(events[-1], Closed)
    assert events[-1].text == expected


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_string_matches_if_the_whole_text_contains_it(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    events = matcher.filter(text_events(ANSWER, *text))
    emitted = "".join(event.text for event in events if isinstance(event, Delta))
    assert text.startswith(emitted)
    assert not any(stop in emitted for stop in stops)
    assert (matcher.matched is None) == (not any(stop in text for stop in stops))


@pytest.mark.parametrize("item", [Reasoning(0), ToolCall(0, 0, "call_1", "f")])
def test_stop_strings_do_not_apply_to_reasoning_and_arguments(item: Reasoning | ToolCall) -> None:
    matcher = StopStrings(["END"])
    events = text_events(item, "one END two")
    assert matcher.filter(events) == events
    assert matcher.matched is None


def test_a_stop_string_does_not_span_two_messages() -> None:
    matcher = StopStrings(["END"])
    first, second = text_events(Text(0, Phase.COMMENTARY), "one E"), text_events(Text(1, Phase.FINAL), "ND two")
    assert matcher.filter(first + second)[-1] == second[-1]
    assert matcher.matched is None


def test_events_after_a_stop_string_are_dropped() -> None:
    matcher = StopStrings(["END"])
    matcher.filter(text_events(ANSWER, "one END two"))
    assert matcher.filter(text_events(Text(1, Phase.FINAL), "more")) == []
