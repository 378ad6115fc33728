"""The fold keeps every item as it closed, and takes nothing for a whole answer that is none."""

from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.core.conversation import Phase
from unisono.core.events import Closed, Delta, Event, Finished, Opened, Reasoning, Repaired, Text, ToolCall
from unisono.core.generation import FinishReason, Usage
from unisono.engine.collect import collect, collect_run

END = Finished(FinishReason.STOP, Usage(3, 2, 1))
THOUGHT, ANSWER, CALL = Reasoning(0), Text(1, Phase.FINAL), ToolCall(2, 0, "call_1", "f")


def life(item: Reasoning | Text | ToolCall, text: str, *, complete: bool = True) -> list[Event]:
    return [Opened(item), *(Delta(item, letter) for letter in text), Closed(item, text, complete=complete)]


CASES: dict[str, tuple[list[Event], list[Closed], list[str]]] = {
    "nothing but the end": ([END], [], []),
    "thought and answer": (
        [*life(THOUGHT, "hm"), *life(ANSWER, "yes"), END],
        [Closed(THOUGHT, "hm"), Closed(ANSWER, "yes")],
        [],
    ),
    "a cut call stays visible as cut": (
        [*life(CALL, '{"a', complete=False), END],
        [Closed(CALL, '{"a', complete=False)],
        [],
    ),
    "repairs in order": (
        [Repaired("one", 1), *life(ANSWER, ""), Repaired("two", 4), END],
        [Closed(ANSWER, "")],
        ["one", "two"],
    ),
}


@pytest.mark.parametrize(("events", "items", "rules"), CASES.values(), ids=CASES)
def test_the_fold_keeps_what_was_closed(events: list[Event], items: list[Closed], rules: list[str]) -> None:
    result = collect(events)
    assert list(result.items) == items
    assert [repaired.rule for repaired in result.repaired] == rules
    assert result.finished == END


@pytest.mark.parametrize("events", [[], life(ANSWER, "half"), [END, Opened(ANSWER)]], ids=["empty", "half", "beyond"])
def test_a_stream_that_does_not_end_with_finished_is_no_answer(events: list[Event]) -> None:
    with pytest.raises(ValueError, match="Finished"):
        collect(events)


@given(st.lists(st.sampled_from([THOUGHT, ANSWER, CALL]), max_size=5), st.lists(st.integers(0, 40), max_size=6))
async def test_cutting_the_stream_into_batches_anywhere_changes_nothing(
    items: list[Reasoning | Text | ToolCall], cuts: list[int]
) -> None:
    events = [event for item in items for event in life(item, "text")] + [END]

    async def batches() -> AsyncIterator[list[Event]]:
        places = [0, *sorted(cuts), len(events)]
        for start, stop in pairwise(places):
            if events[start:stop]:
                yield events[start:stop]

    assert await collect_run(batches()) == collect(events)
