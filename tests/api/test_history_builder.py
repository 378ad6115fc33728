"""Checks of the history that a client sends."""

from __future__ import annotations

import pytest

from unisono.api.history_builder import History
from unisono.core.conversation import AssistantCall, AssistantReasoning, Item, ToolResult
from unisono.errors import InvalidRequest


def with_unknown_result() -> History:
    history = History()
    history.name_of("call_gone", "input.0.call_id")
    return history


def test_a_result_without_its_call_is_refused_if_the_history_is_stored() -> None:
    with pytest.raises(InvalidRequest, match="call_gone"):
        with_unknown_result().check_results(has_stored_history=True)


def test_a_compaction_removes_the_errors_about_the_items_that_it_replaces() -> None:
    history = with_unknown_result()
    history.leave_out(InvalidRequest("unknown item", param="input.1"), "it is unknown")
    history.clear()
    history.check_results(has_stored_history=True)


def test_a_repeated_item_is_moved_only_before_its_result() -> None:
    thought, call, result = AssistantReasoning("Look."), AssistantCall("c1", "look", "{}"), ToolResult("c1", "look", "")
    history = History()
    expected: list[Item] = [thought, call, result, thought, call, result]
    history.add(thought)
    history.call(call)
    history.move_if_repeated([thought, call])
    for _ in range(2):
        history.add(AssistantReasoning("Look."))
        history.call(AssistantCall("c1", "look", "{}"))
        history.result(result)
    assert list(history.items()) == expected


def test_a_result_belongs_to_the_newest_call_if_an_id_is_used_again() -> None:
    history = History()
    expected: list[Item] = []
    for name, output in [("shell", "one"), ("read_file", "two"), ("shell", "three")]:
        history.call(AssistantCall("call_0", name, "{}"))
        history.result(ToolResult("call_0", name, output))
        expected += [AssistantCall("call_0", name, "{}"), ToolResult("call_0", name, output)]
    assert list(history.items()) == expected


def test_a_call_id_of_messages_becomes_the_id_of_the_gateway() -> None:
    history = History()
    history.call(AssistantCall("toolu_1", "look", "{}"))
    assert history.has_call("call_1")
    assert history.name_of("toolu_1", "input.1.call_id") == "look"
    history.result(ToolResult("toolu_1", "look", "one"))
    assert list(history.items()) == [AssistantCall("call_1", "look", "{}"), ToolResult("call_1", "look", "one")]
