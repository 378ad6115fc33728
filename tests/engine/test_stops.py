"""Stop strings cut visible text exactly, wherever the stream is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.conversation import Phase
from unisono.core.events import Closed, Delta, Event, Opened, Reasoning, Text, ToolCall
from unisono.engine.interventions.stop_strings import StopStrings

ANSWER = Text(0, Phase.FINAL)


def said(item: Text | Reasoning | ToolCall, *texts: str) -> list[Event]:
    return [Opened(item), *(Delta(item, text) for text in texts if text), Closed(item, "".join(texts))]


CASES: dict[str, tuple[tuple[str, ...], str, str, str | None]] = {
    "in the middle": (("END",), "one END two", "one ", "END"),
    "at the beginning": (("one",), "one two", "", "one"),
    "never": (("END",), "one EN D", "one EN D", None),
    "a beginning at the end": (("END",), "one EN", "one EN", None),
    "the first of several": (("two", "one"), "one two", "", "one"),
    "the first to be complete": (("ab", "abc", "xabcd"), "xabcd", "x", "ab"),
    "the longest of those": (("b", "ab"), "xabcd", "x", "ab"),
    "overlapping beginnings": (("aab",), "aaab!", "a", "aab"),
    "white space": (("\n\n",), "a\nb\n\nc", "a\nb", "\n\n"),
    "a marker as text": (("<|end|>",), "a <|end|> b", "a ", "<|end|>"),
    "not only ASCII": (("語。",), "日本語。はい", "日本", "語。"),
}


@pytest.mark.parametrize(("stops", "text", "shown", "met"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_text_ends_before_the_stop_string(
    stops: tuple[str, ...], text: str, shown: str, met: str | None, size: int
) -> None:
    matcher = StopStrings(stops)
    events: list[Event] = []
    for event in said(ANSWER, *(text[at : at + size] for at in range(0, len(text), size))):
        events += matcher.filter([event])
    assert matcher.matched == met
    assert "".join(event.text for event in events if isinstance(event, Delta)) == shown
    assert isinstance(events[-1], Closed)
    assert events[-1].text == shown


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_any_stop_string_is_found_where_the_whole_text_holds_it(text: str, stops: list[str]) -> None:
    matcher = StopStrings(stops)
    events = matcher.filter(said(ANSWER, *text))
    shown = "".join(event.text for event in events if isinstance(event, Delta))
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert (matcher.matched is None) == (not any(stop in text for stop in stops))


@pytest.mark.parametrize("item", [Reasoning(0), ToolCall(0, 0, "call_1", "f")])
def test_reasoning_and_arguments_hold_what_they_hold(item: Reasoning | ToolCall) -> None:
    matcher = StopStrings(["END"])
    events = said(item, "one END two")
    assert matcher.filter(events) == events
    assert matcher.matched is None


def test_a_stop_string_does_not_span_two_messages() -> None:
    matcher = StopStrings(["END"])
    first, second = said(Text(0, Phase.COMMENTARY), "one E"), said(Text(1, Phase.FINAL), "ND two")
    assert matcher.filter(first + second)[-1] == second[-1]
    assert matcher.matched is None


def test_nothing_passes_after_a_stop_string() -> None:
    matcher = StopStrings(["END"])
    matcher.filter(said(ANSWER, "one END two"))
    assert matcher.filter(said(Text(1, Phase.FINAL), "more")) == []
