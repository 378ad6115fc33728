"""A single deployment that fails behind a tool call is asked again, and the tool is not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TypeAlias

import pytest

from tests.e2e.gateway import message_of
from tests.e2e.hosting import calls, desk, made, result
from tests.e2e.responses import THOUGHT, Json, Line, streamed, text_of
from tests.e2e.wires import ENCODING
from tests.fakes import Refusal, VllmScript, reset_at
from tests.fakes.faults import Fault
from tests.mcp.conftest import Upstream, start_upstream

Failure: TypeAlias = Fault | Refusal

TEXT = "One answer, and all of it."
ANSWER = ENCODING.encode_marked(f"{THOUGHT}<|channel|>final<|message|>{TEXT}<|return|>")
# Of the requests that follow the tool call, one after the other.
FAILURES: dict[str, Callable[[], list[Failure]]] = {
    "reset before the first token": lambda: [reset_at(0)],
    "503": lambda: [Refusal(503, b"busy")],
    "500 twice": lambda: [Refusal(500, b"boom"), Refusal(500, b"boom")],
    "reset at token 5": lambda: [reset_at(5)],
    "reset at token 12": lambda: [reset_at(12)],
    "reset at token 5, then 503": lambda: [reset_at(5), Refusal(503, b"loading")],
}


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    with start_upstream(tmp_path_factory.mktemp("upstream")) as (_, found):
        yield found


class Cases:
    """A model that calls `echo` with the name of the case that its prompt holds, and answers once it has the result."""

    def __init__(self) -> None:
        self.left: dict[str, list[Failure]] = {}

    def script(self, asked: Json) -> VllmScript | Refusal:
        prompt: list[int] = asked["prompt"]
        marked = ENCODING.decode(prompt)
        named = re.search(r"case-[a-z]+-\d\d", marked)
        assert named is not None
        if result("echo", named[0]) not in marked:
            return VllmScript(tokens=ENCODING.encode_marked(calls("echo", text=named[0])))
        failures = self.left[named[0]]
        failure = failures.pop(0) if failures else None
        if isinstance(failure, Refusal):
            return failure
        said = next(n for n in range(len(ANSWER), -1, -1) if prompt[len(prompt) - n :] == ANSWER[:n])
        return VllmScript(tokens=ANSWER[said:], faults=() if failure is None else (failure,))


async def chat(here: Line, case: str, *, stream: bool) -> tuple[str | None, int]:
    """The text of the answer, and how often another attempt was made."""
    messages = [{"role": "user", "content": case}]
    answer = await here.gateway.chat(messages=messages, stream=stream, unisono={"run_tools": True})
    assert answer.status == 200, answer.raw
    message = message_of(answer)
    assert message.finish_reason == "stop"
    return message.content, message.note["failovers"]


async def respond(here: Line, case: str, *, stream: bool, background: bool = False) -> tuple[str | None, int]:
    answer = await here.post(input=case, stream=stream, background=background)
    assert answer.status == 200, answer.raw
    response = streamed(answer).last if stream else answer.body
    async with asyncio.timeout(20):
        while response["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.05)
            response = await here.kept(response)
    assert response["status"] == "completed"
    assert [call["output"] for call in made(response)] == [case]
    assert await here.kept(response) == response
    return text_of(response), response["unisono"]["failovers"]


WAYS: dict[str, Callable[[Line, str], Awaitable[tuple[str | None, int]]]] = {
    "chat": lambda here, case: chat(here, case, stream=False),
    "chatstream": lambda here, case: chat(here, case, stream=True),
    "response": lambda here, case: respond(here, case, stream=False),
    "responsestream": lambda here, case: respond(here, case, stream=True),
    "background": lambda here, case: respond(here, case, stream=False, background=True),
    "backgroundstream": lambda here, case: respond(here, case, stream=True, background=True),
}


@asynccontextmanager
async def before_one(upstream: Upstream) -> AsyncIterator[tuple[Cases, Line]]:
    """A gateway with the tool server and a single deployment that may be asked again."""
    settings = {"num_retries": 2, "allowed_fails": 100_000, "cooldown_time": 0.01}
    async with desk(upstream, router_settings=settings) as here:
        cases = Cases()
        here.fake.script = cases.script  # type: ignore[assignment]
        yield cases, here


@pytest.mark.parametrize("way", WAYS)
async def test_a_tool_that_has_run_is_not_run_again(upstream: Upstream, way: str) -> None:
    async with before_one(upstream) as (cases, here):

        async def check(number: int, name: str) -> None:
            case = f"case-{way}-{number:02}"
            failures = cases.left[case] = FAILURES[name]()
            expected = len(failures)
            assert await WAYS[way](here, case) == (TEXT, expected), name
            assert failures == []
            assert upstream.noted(case) == [f"echo {case}"], name

        await asyncio.gather(*(check(number, name) for number, name in enumerate(FAILURES)))


@pytest.mark.slow
async def test_a_client_is_told_not_to_repeat_a_request_whose_tool_has_run(upstream: Upstream) -> None:
    """Streams end in an error event, which no client library repeats."""
    async with before_one(upstream) as (cases, here):
        case = "case-final-00"
        cases.left[case] = [Refusal(503, b"busy") for _ in range(20)]
        answer = await here.gateway.chat(messages=[{"role": "user", "content": case}], unisono={"run_tools": True})
        assert upstream.noted(case) == [f"echo {case}"]
        assert answer.status == 503, answer.raw
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers
