"""Record of a background response: its count of crashes, and the time since which it has no owner."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.api.responses.background.job_record import with_handover_noted, with_leaving_noted, with_takeover_counted
from unisono.core.state_store import Status, StoredResponse

CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    # case: (notes of the record, logged tokens, consecutive crashes)
    "no notes": ({}, 0, 1),
    "a first crash": ({"tries": [0, 0]}, 0, 1),
    "another crash": ({"tries": [2, 5]}, 5, 3),
    "a crash after new tokens": ({"tries": [2, 5]}, 6, 1),
    "a handover": ({"tries": [2, 5], "handed_over": [2, 5]}, 5, 2),
    "a handover after new tokens": ({"tries": [2, 5], "handed_over": [2, 5]}, 6, 0),
    "a handover to an owner that ignores the note and crashes": ({"tries": [3, 5], "handed_over": [2, 5]}, 5, 4),
    "a handover without a count": ({"handed_over": [0, 0]}, 0, 0),
}


@pytest.mark.parametrize(("notes", "tokens", "crashes"), CASES.values(), ids=CASES)
def test_only_crashes_without_new_tokens_are_counted(notes: dict[str, Any], tokens: int, crashes: int) -> None:
    record = StoredResponse("resp_1", Status.QUEUED, "gpt-oss", 1.0, notes={"asked": {}, **notes})
    noted, counted = with_takeover_counted(record, tokens)
    assert counted == crashes
    assert noted.status is Status.IN_PROGRESS
    assert noted.notes == {"asked": {}, "tries": [crashes, tokens]}
    # The owner hands it over without a new token, and the next owner crashes.
    again, counted = with_takeover_counted(with_handover_noted(noted), tokens)
    assert (again, counted) == (noted, crashes)
    assert with_takeover_counted(again, tokens)[1] == crashes + 1


def test_the_time_without_an_owner_restarts_after_a_takeover() -> None:
    record = StoredResponse("resp_1", Status.IN_PROGRESS, "gpt-oss", 1.0, notes={"tries": [1, 5]})
    left, since = with_leaving_noted(record, 10.0)
    assert since == 10.0
    again, since = with_leaving_noted(left, 20.0)
    assert (again, since) == (left, 10.0)
    continued, _ = with_takeover_counted(again, 6)
    assert with_leaving_noted(continued, 30.0)[1] == 30.0
