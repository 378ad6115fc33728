"""A single deployment that fails after a tool call is retried without repeating the call."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import pytest

from tests.e2e.gateway import message_of
from tests.e2e.hosting import calls, desk, made, result
from tests.e2e.responses import THOUGHT, Json, Line, streamed, text_of
from tests.e2e.wires import ENCODING
from tests.fakes import Refusal, VllmScript, reset_at
from tests.fakes.faults import Fault
from tests.mcp.conftest import Upstream

Failure: TypeAlias = Fault | Refusal

TEXT = "One answer, and all of it."
ANSWER = ENCODING.encode_marked(f"{THOUGHT}<|channel|>final<|message|>{TEXT}<|return|>")
# Failures of the requests after the tool call, in order.
FAILURES: dict[str, Callable[[], list[Failure]]] = {
    "reset before the first token": lambda: [reset_at(0)],
    "503": lambda: [Refusal(503, b"busy")],
    "500 twice": lambda: [Refusal(500, b"boom"), Refusal(500, b"boom")],
    "reset at token 5": lambda: [reset_at(5)],
    "reset at token 12": lambda: [reset_at(12)],
    "reset at token 5, then 503": lambda: [reset_at(5), Refusal(503, b"loading")],
}


class Cases:
    """A model that calls `echo` with the name of its case, and answers once it has the result."""

    def __init__(self) -> None:
        self.failures_by_case: dict[str, list[Failure]] = {}

    def script(self, request: Json) -> VllmScript | Refusal:
        prompt: list[int] = request["prompt"]
        marked = ENCODING.decode(prompt)
        match = re.search(r"case-[a-z]+-\d\d", marked)
        assert match is not None
        if result("echo", match[0]) not in marked:
            return VllmScript(tokens=ENCODING.encode_marked(calls("echo", text=match[0])))
        failures = self.failures_by_case[match[0]]
        failure = failures.pop(0) if failures else None
        if isinstance(failure, Refusal):
            return failure
        given_count = next(n for n in range(len(ANSWER), -1, -1) if prompt[len(prompt) - n :] == ANSWER[:n])
        return VllmScript(tokens=ANSWER[given_count:], faults=() if failure is None else (failure,))


async def chat(harness: Line, case: str, *, stream: bool) -> tuple[str | None, int]:
    """Return the text of the answer and the number of failovers."""
    messages = [{"role": "user", "content": case}]
    response = await harness.gateway.chat(messages=messages, stream=stream, unisono={"run_tools": True})
    assert response.status == 200, response.raw
    message = message_of(response)
    assert message.finish_reason == "stop"
    return message.content, message.note["failovers"]


async def respond(harness: Line, case: str, *, stream: bool, background: bool = False) -> tuple[str | None, int]:
    reply = await harness.post(input=case, stream=stream, background=background)
    assert reply.status == 200, reply.raw
    response = streamed(reply).last if stream else reply.body
    async with asyncio.timeout(20):
        while response["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.05)
            response = await harness.kept(response)
    assert response["status"] == "completed"
    assert [call["output"] for call in made(response)] == [case]
    assert await harness.kept(response) == response
    return text_of(response), response["unisono"]["failovers"]


REQUEST_MODES: dict[str, Callable[[Line, str], Awaitable[tuple[str | None, int]]]] = {
    "chat": lambda harness, case: chat(harness, case, stream=False),
    "chatstream": lambda harness, case: chat(harness, case, stream=True),
    "response": lambda harness, case: respond(harness, case, stream=False),
    "responsestream": lambda harness, case: respond(harness, case, stream=True),
    "background": lambda harness, case: respond(harness, case, stream=False, background=True),
    "backgroundstream": lambda harness, case: respond(harness, case, stream=True, background=True),
}


@asynccontextmanager
async def single_deployment(upstream: Upstream) -> AsyncIterator[tuple[Cases, Line]]:
    """Run a gateway with the tool server and a single deployment with retries."""
    settings = {"num_retries": 2, "allowed_fails": 100_000, "cooldown_time": 0.01}
    async with desk(upstream, router_settings=settings) as harness:
        cases = Cases()
        harness.fake.script = cases.script  # type: ignore[assignment]
        yield cases, harness


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("mode", REQUEST_MODES)
async def test_a_tool_is_not_run_again_by_a_retry(upstream: Upstream, mode: str) -> None:
    async with single_deployment(upstream) as (cases, harness):

        async def check(number: int, name: str) -> None:
            case = f"case-{mode}-{number:02}"
            failures = cases.failures_by_case[case] = FAILURES[name]()
            # Retries on the same deployment are not failovers.
            assert await REQUEST_MODES[mode](harness, case) == (TEXT, 0), name
            assert failures == []
            assert upstream.noted(case) == [f"echo {case}"], name

        await asyncio.gather(*(check(number, name) for number, name in enumerate(FAILURES)))


@pytest.mark.slow
async def test_a_failure_after_a_tool_call_forbids_client_retries(upstream: Upstream) -> None:
    """Streams end in an error event, which no client library retries."""
    async with single_deployment(upstream) as (cases, harness):
        case = "case-final-00"
        cases.failures_by_case[case] = [Refusal(503, b"busy") for _ in range(20)]
        response = await harness.gateway.chat(messages=[{"role": "user", "content": case}], unisono={"run_tools": True})
        assert upstream.noted(case) == [f"echo {case}"]
        assert response.status == 503, response.raw
        assert response.headers["x-should-retry"] == "false"
        assert "retry-after" not in response.headers
