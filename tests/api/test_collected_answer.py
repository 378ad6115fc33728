"""Collection of a stream into one answer, and rejection of incomplete streams."""

from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.api.collected_answer import collect, collect_run
from unisono.core.conversation import Phase
from unisono.core.events import Closed, Delta, Event, Finished, Opened, Reasoning, Repaired, Text, ToolCall
from unisono.core.generation import FinishReason, Usage

END = Finished(FinishReason.STOP, Usage(3, 2, 1))
THOUGHT, ANSWER, CALL = Reasoning(0), Text(1, Phase.FINAL), ToolCall(2, 0, "call_1", "f")


def lifecycle(item: Reasoning | Text | ToolCall, text: str, *, complete: bool = True) -> list[Event]:
    return [Opened(item), *(Delta(item, letter) for letter in text), Closed(item, text, complete=complete)]


CASES: dict[str, tuple[list[Event], list[Closed], list[str]]] = {
    "only a finished event": ([END], [], []),
    "reasoning and answer": (
        [*lifecycle(THOUGHT, "hm"), *lifecycle(ANSWER, "yes"), END],
        [Closed(THOUGHT, "hm"), Closed(ANSWER, "yes")],
        [],
    ),
    "incomplete call": (
        [*lifecycle(CALL, '{"a', complete=False), END],
        [Closed(CALL, '{"a', complete=False)],
        [],
    ),
    "recoveries in order": (
        [Repaired("one", 1), *lifecycle(ANSWER, ""), Repaired("two", 4), END],
        [Closed(ANSWER, "")],
        ["one", "two"],
    ),
}


@pytest.mark.parametrize(("events", "items", "rules"), CASES.values(), ids=CASES)
def test_collect_returns_closed_items(events: list[Event], items: list[Closed], rules: list[str]) -> None:
    result = collect(events)
    assert list(result.items) == items
    assert [repaired.rule for repaired in result.repaired] == rules
    assert result.finished == END


@pytest.mark.parametrize(
    "events",
    [[], lifecycle(ANSWER, "half"), [END, Opened(ANSWER)]],
    ids=["empty", "unfinished", "event after finished"],
)
def test_collect_rejects_a_stream_without_a_final_finished_event(events: list[Event]) -> None:
    with pytest.raises(ValueError, match="Finished"):
        collect(events)


@given(st.lists(st.sampled_from([THOUGHT, ANSWER, CALL]), max_size=5), st.lists(st.integers(0, 40), max_size=6))
async def test_batch_boundaries_do_not_change_the_result(
    items: list[Reasoning | Text | ToolCall], cuts: list[int]
) -> None:
    events = [event for item in items for event in lifecycle(item, "text")] + [END]

    async def batches() -> AsyncIterator[list[Event]]:
        edges = [0, *sorted(cuts), len(events)]
        for start, stop in pairwise(edges):
            if events[start:stop]:
                yield events[start:stop]

    assert await collect_run(batches()) == collect(events)
