"""Facts that the relay reads from pass-through responses: usage, text and finish reason."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.core.conversation import Json
from unisono.core.generation import FinishReason, Usage
from unisono.core.passthrough_request import AnswerMode, Api, PassthroughRequest
from unisono.passthrough.text_relays import relay_for


def passthrough_request(api: Api, *, stream: bool, choices: int = 1, wants_usage: bool = True) -> PassthroughRequest:
    return PassthroughRequest(
        api, AnswerMode.PASSTHROUGH, {}, "mine", stream, tokens=5, choices=choices, is_usage_requested=wants_usage
    )


def chunk(index: int, text: str = "", finish: str | None = None) -> dict[str, Json]:
    return {"model": "theirs", "choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]}


def test_a_response_with_several_choices_ends_with_the_last() -> None:
    relaying = relay_for(passthrough_request(Api.CHAT, stream=True, choices=2))
    relaying.feed([chunk(0, "a"), chunk(1, "b"), chunk(0, finish="stop")])
    assert (relaying.is_complete, relaying.ending) == (False, False)
    relaying.feed([chunk(1, "c", finish="length")])
    assert (relaying.is_complete, relaying.ending, relaying.reason) == (True, True, FinishReason.LENGTH)
    assert relaying.text == ["a", "b", "c"]


def test_a_stream_may_have_fewer_choices_than_requested() -> None:
    relaying = relay_for(passthrough_request(Api.CHAT, stream=True, choices=2))
    relaying.feed([chunk(0, "a"), chunk(0, finish="stop")])
    assert (relaying.is_complete, relaying.ending) == (True, False)


USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 8},
    "completion_tokens_details": {"reasoning_tokens": 3},
}
CALL = {"tool_calls": [{"function": {"name": "f", "arguments": "x" * 40}}]}
USAGES: dict[str, tuple[Api, dict[str, Any], Usage]] = {
    "reported": (Api.CHAT, {"choices": [], "usage": USAGE}, Usage(9, 4, 3, 8)),
    "estimated": (
        Api.CHAT,
        {"choices": [{"message": {"content": "x" * 40, "reasoning_content": "x" * 40}, "finish_reason": "stop"}]},
        Usage(5, 20),
    ),
    "estimated from a call": (Api.CHAT, {"choices": [{"message": CALL, "finish_reason": "tool_calls"}]}, Usage(5, 10)),
    "invalid": (Api.CHAT, {"choices": 7, "usage": {"prompt_tokens": "9", "completion_tokens": -1}}, Usage(5, 0)),
    "implausible": (
        Api.CHAT,
        {"choices": [{"message": CALL}], "usage": {"prompt_tokens": 2**63, "completion_tokens": 10**9 + 1}},
        Usage(5, 10),
    ),
    "incomplete": (Api.CHAT, {"choices": [{"message": CALL}], "usage": {"prompt_tokens": 3}}, Usage(3, 10)),
    "details larger than the totals": (
        Api.CHAT,
        {"usage": {**USAGE, "prompt_tokens": 2, "completion_tokens": 1}},
        Usage(2, 1, 1, 2),
    ),
    "of the Responses API": (
        Api.RESPONSES,
        {"status": "completed", "usage": {"input_tokens": 3, "output_tokens": 2, "output_tokens_details": None}},
        Usage(3, 2),
    ),
    "estimated on the Responses API": (
        Api.RESPONSES,
        {"status": "completed", "output": [{"type": "message", "content": [{"text": "x" * 40}]}]},
        Usage(5, 10),
    ),
}


@pytest.mark.parametrize(("api", "body", "usage"), USAGES.values(), ids=USAGES)
def test_usage_is_read_or_estimated(api: Api, body: dict[str, Any], usage: Usage) -> None:
    relaying = relay_for(passthrough_request(api, stream=False))
    [relayed] = relaying.feed([body])
    assert relaying.usage == usage
    assert relayed.body == {**body, "model": "mine"}


ENDS = {
    "completed": (FinishReason.STOP, False),
    "incomplete": (FinishReason.LENGTH, False),
    "failed": (FinishReason.STOP, True),
}


@pytest.mark.parametrize("status", ENDS)
def test_the_status_of_a_response_sets_its_finish_reason(status: str) -> None:
    relaying = relay_for(passthrough_request(Api.RESPONSES, stream=True))
    relaying.feed([{"type": "response.output_text.delta", "delta": "Hi"}])
    assert not relaying.is_complete
    relaying.feed([{"type": f"response.{status}", "response": {"status": status}}])
    assert ((relaying.reason, relaying.failed), relaying.ending) == (ENDS[status], True)
