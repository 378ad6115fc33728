"""Time limit for server tools of a background response that is generated again."""

from __future__ import annotations

import pytest

from unisono.api.responses.background.job_record import later
from unisono.core.conversation import Conversation, Preamble
from unisono.engine.request import GenerationRequest, ServerTools

REQUEST = GenerationRequest("gpt-oss", Conversation(Preamble(), ()))
CASES: dict[str, tuple[float, float, float]] = {
    # case: (limit, time spent, time left)
    "no time spent": (1800.0, 0.0, 1800.0),
    "some time spent": (1800.0, 700.0, 1100.0),
    "more than the limit spent": (1800.0, 5000.0, 0.0),
}


@pytest.mark.parametrize(("total_s", "spent_s", "left_s"), CASES.values(), ids=CASES)
def test_the_time_spent_is_subtracted_from_the_tool_time_limit(total_s: float, spent_s: float, left_s: float) -> None:
    hosting = ServerTools(max_calls=3, total_s=total_s)
    restarted = later(GenerationRequest(REQUEST.model, REQUEST.conversation, server_tools=hosting), spent_s)
    assert restarted.server_tools == ServerTools(max_calls=3, total_s=left_s)


def test_a_request_without_server_tools_is_unchanged() -> None:
    assert later(REQUEST, 100.0) == REQUEST
