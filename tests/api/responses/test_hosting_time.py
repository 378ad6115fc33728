"""The time for tools of a response that is made a second time."""

from __future__ import annotations

import pytest

from unisono.api.responses.background.job_record import later
from unisono.core.conversation import Conversation, Preamble
from unisono.engine.request import GenerationRequest, ServerTools

TURN = GenerationRequest("gpt-oss", Conversation(Preamble(), ()))
LEFT: dict[str, tuple[float, float, float]] = {
    # of so much, after so much, is left
    "none has passed": (1800.0, 0.0, 1800.0),
    "some has passed": (1800.0, 700.0, 1100.0),
    "more than all has passed": (1800.0, 5000.0, 0.0),
}


@pytest.mark.parametrize(("total_s", "spent_s", "left_s"), LEFT.values(), ids=LEFT)
def test_what_is_left_is_what_has_not_passed(total_s: float, spent_s: float, left_s: float) -> None:
    hosting = ServerTools(max_calls=3, total_s=total_s)
    turned = later(GenerationRequest(TURN.model, TURN.conversation, server_tools=hosting), spent_s)
    assert turned.server_tools == ServerTools(max_calls=3, total_s=left_s)


def test_a_turn_without_tools_is_as_it_was() -> None:
    assert later(TURN, 100.0) == TURN
