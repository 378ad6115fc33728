"""Checks of the history that a client sends."""

from __future__ import annotations

import pytest

from unisono.api.history_builder import History
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
