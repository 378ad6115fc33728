"""Requests with an idempotency key that fail: the same result as without a key."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.hosting import calls, desk, made
from tests.e2e.responses import ANSWER, Line, line, streamed
from tests.e2e.wires import WIRES
from tests.fakes import Refusal, close_at
from tests.mcp.conftest import Upstream

GUARDRAIL = {
    "guardrail_name": "words",
    "litellm_params": {
        "guardrail": "litellm_content_filter",
        "mode": "post_call",
        "default_on": True,
        "blocked_words": [{"keyword": "zebra", "action": "BLOCK"}],
    },
}
KEY = {"idempotency-key": "key"}
HEADERS = ("retry-after", "x-should-retry")


def blocked(harness: Line) -> None:
    harness.say(ANSWER.replace("ok", "A zebra."))


def rejected(harness: Line) -> None:
    harness.fake.script = lambda _: Refusal(400, b'{"error": {"message": "bad", "code": 400}}')


def busy(harness: Line) -> None:
    harness.fake.script = lambda _: Refusal(429, b"{}", headers={"Retry-After": "7"})


def cut(harness: Line) -> None:
    harness.say(ANSWER, faults=(close_at(4),))


# Function that makes the next answers fail, and the status, type and code of the error.
FAILURES: dict[str, tuple[Any, tuple[int, str, str]]] = {
    "blocked by a guardrail": (blocked, (400, "invalid_request_error", "content_blocked")),
    "rejected by the backend": (rejected, (400, "invalid_request_error", "backend_rejected_request")),
    "overloaded": (busy, (503, "server_error", "backend_overloaded")),
    "cut off": (cut, (502, "server_error", "backend_protocol_error")),
}


@pytest.mark.parametrize(("fail", "expected"), FAILURES.values(), ids=FAILURES)
async def test_a_failure_has_the_same_error_with_and_without_a_key(fail: Any, expected: tuple[int, str, str]) -> None:
    async with line(WIRES["vllm"], guardrails=[GUARDRAIL]) as harness:
        fail(harness)
        plain, keyed = await harness.post(), await harness.post(headers=KEY)
        error = plain.body["error"]
        assert (plain.status, error["type"], error["code"]) == expected
        assert (keyed.status, keyed.body) == (plain.status, plain.body)
        assert [keyed.headers.get(name) for name in HEADERS] == [plain.headers.get(name) for name in HEADERS]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_failure_after_a_tool_call_shows_the_call_and_is_not_repeated(upstream: Upstream, stream: bool) -> None:
    async with desk(upstream, guardrails=[GUARDRAIL]) as harness:
        outputs = (calls("echo", text="once"), ANSWER.replace("ok", "A zebra."))
        responses = []
        for headers in ({}, KEY, KEY):
            harness.say(*outputs)
            answer = await harness.post(headers=headers, stream=stream)
            assert answer.status == 200, answer.raw
            responses.append(streamed(answer).last if stream else answer.body)
        assert not harness.fake.requests
        for response in responses:
            [call] = made(response)
            assert (response["status"], call["output"]) == ("failed", "once")
        plain, keyed, repeated = responses
        assert keyed["error"] == plain["error"]
        assert repeated == keyed
        # A new key is a new request.
        harness.say(calls("echo", text="again"), ANSWER)
        answer = await harness.post(headers={"idempotency-key": "new"}, stream=stream)
        assert (streamed(answer).last if stream else answer.body)["status"] == "completed"
