"""Tools that ask the user during a call. On every transport the answer continues the call."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.mcp.arguments import sent
from tests.mcp.conftest import SLOW_STDIO, TRANSPORTS, Upstream
from unisono.core.tool_host import ToolOutcome, ToolQuestion, UserAction, UserAnswer
from unisono.mcp import McpHost

# A stateless server cannot ask while a call runs: nothing relates the answer to the call.
ASKING = [transport for transport in TRANSPORTS if transport not in ("legacy_json", "stateless")]
MODERN = ("modern", "modern_json")


def question_of(outcome: ToolOutcome) -> ToolQuestion:
    assert outcome.question is not None, outcome
    assert not outcome.is_error
    assert outcome.question.message in outcome.text
    return outcome.question


def accepted(question: ToolQuestion, content: Any) -> UserAnswer:
    return UserAnswer(UserAction.ACCEPT, content, question.state)


@pytest.mark.parametrize("transport", ASKING)
async def test_the_answer_of_the_user_continues_the_call(host: McpHost, upstream: Upstream, transport: str) -> None:
    server, arguments = upstream.server(transport), sent({"city": f"Oslo {transport}"})
    question = question_of(await host.call(server, "book", arguments, can_ask=True))
    assert question.message == f"When do you travel to Oslo {transport}?"
    assert set(question.schema["properties"]) == {"day", "seats"}  # type: ignore[call-overload, arg-type]
    assert upstream.noted(f"book Oslo {transport} Monday") == []
    answer = accepted(question, {"day": "Monday", "seats": 2})
    outcome = await host.call(server, "book", arguments, can_ask=True, answer=answer)
    assert (outcome.text, outcome.question) == (f"booked Oslo {transport} on Monday for 2", None)
    assert upstream.noted(f"book Oslo {transport} Monday") == [f"book Oslo {transport} Monday 2"]


@pytest.mark.parametrize("transport", ["modern", "legacy", "sse"])
async def test_a_tool_asks_while_another_call_runs(host: McpHost, upstream: Upstream, transport: str) -> None:
    server, arguments = upstream.server(transport), sent({"city": f"Riga {transport}"})
    answer = None
    for turn in range(2):
        name = f"beside {transport} {turn}"
        other = asyncio.create_task(host.call(server, "slow", sent({"seconds": 0.5, "name": name}), can_ask=True))
        await upstream.until_noted(f"slow begins {name}")
        outcome = await host.call(server, "book", arguments, can_ask=True, answer=answer)
        assert ((await other).text, (await other).question) == ("done", None)
        if turn == 0:
            answer = accepted(question_of(outcome), {"day": "Monday", "seats": 2})
    assert (outcome.text, outcome.question) == (f"booked Riga {transport} on Monday for 2", None)


@pytest.mark.parametrize("transport", ["legacy", "sse"])
async def test_two_tools_ask_at_the_same_time(host: McpHost, upstream: Upstream, transport: str) -> None:
    server, cities = upstream.server(transport), ("Kiel", "Lund")

    async def outcomes() -> list[ToolOutcome]:
        return await asyncio.gather(*(host.call(server, "book", sent({"city": each}), can_ask=True) for each in cities))

    if transport != "legacy":
        # The first questions do not name their calls, and neither call can go on alone.
        for outcome in await outcomes():
            assert outcome.question is None
            assert outcome.text.startswith("not booked: cancel")
            assert all(f"When do you travel to {city}?" in outcome.text for city in cities)
            assert "may belong to another call" in outcome.text
    questions = [question_of(outcome).message for outcome in await outcomes()]
    assert questions == [f"When do you travel to {city}?" for city in cities]


@pytest.mark.parametrize("action", [UserAction.DECLINE, UserAction.CANCEL])
@pytest.mark.parametrize("transport", ["modern", "legacy", SLOW_STDIO])
async def test_a_tool_learns_that_the_user_does_not_answer(
    host: McpHost, upstream: Upstream, transport: str, action: UserAction
) -> None:
    server, arguments = upstream.server(transport), sent({"city": "Rome"})
    question = question_of(await host.call(server, "book", arguments, can_ask=True))
    outcome = await host.call(server, "book", arguments, can_ask=True, answer=UserAnswer(action, None, question.state))
    assert outcome.text == f"not booked: {action}"


@pytest.mark.parametrize("content", [{"day": "Monday", "seats": 10**30}, {"day": "\ud800", "seats": 2}])
async def test_an_answer_that_cannot_be_sent_is_cancelled(host: McpHost, upstream: Upstream, content: Any) -> None:
    server, arguments = upstream.server("modern"), sent({"city": "Linz"})
    question = question_of(await host.call(server, "book", arguments, can_ask=True))
    outcome = await host.call(server, "book", arguments, can_ask=True, answer=accepted(question, content))
    assert outcome.text == "not booked: cancel"


@pytest.mark.parametrize("transport", ["modern", "legacy", "sse", SLOW_STDIO])
async def test_several_questions_are_asked_one_after_another(host: McpHost, upstream: Upstream, transport: str) -> None:
    server, arguments = upstream.server(transport), sent({"city": f"Bern {transport}"})
    answers = {"When": {"day": "Friday", "seats": 1}, "First": {"first": True}}
    outcome = await host.call(server, "upgrade", arguments, can_ask=True)
    for _ in answers:
        question = question_of(outcome)
        answer = accepted(question, answers[question.message.split()[0]])
        outcome = await host.call(server, "upgrade", arguments, can_ask=True, answer=answer)
    assert (outcome.text, outcome.question) == (f"Bern {transport} on Friday, first class: True", None)
    assert len(upstream.noted(f"upgrade Bern {transport} Friday True")) == 1


@pytest.mark.parametrize("transport", ["modern", "legacy", SLOW_STDIO])
async def test_without_a_user_the_model_reads_the_question(host: McpHost, upstream: Upstream, transport: str) -> None:
    outcome = await host.call(upstream.server(transport), "book", sent({"city": "Ulm"}))
    assert outcome.question is None
    assert "When do you travel to Ulm?" in outcome.text
    assert "cannot be passed on" in outcome.text


@pytest.mark.parametrize("transport", ["modern", "legacy", SLOW_STDIO])
async def test_a_server_that_may_not_ask_learns_it(host: McpHost, upstream: Upstream, transport: str) -> None:
    server = upstream.server(transport, may_ask=False)
    outcome = await host.call(server, "book", sent({"city": "Graz"}), can_ask=True)
    assert outcome.is_error
    assert outcome.question is None
    assert upstream.noted("book Graz") == []


@pytest.mark.parametrize("name", ["javascript:alert(1)", "x" * 3000])
async def test_no_user_is_sent_to_a_dangerous_page(host: McpHost, upstream: Upstream, name: str) -> None:
    outcome = await host.call(upstream.server("legacy"), "files", sent({"name": name}), can_ask=True)
    assert (outcome.is_error, outcome.question) == (True, None)


@pytest.mark.parametrize("transport", ["legacy", SLOW_STDIO])
async def test_the_user_is_sent_to_a_page(host: McpHost, upstream: Upstream, transport: str) -> None:
    server, arguments = upstream.server(transport), sent({"name": transport})
    question = question_of(await host.call(server, "files", arguments, can_ask=True))
    assert question.url == f"https://sign-in.example.com/{transport}"
    early = await host.call(server, "files", arguments, can_ask=True, answer=accepted(question, None))
    assert early.is_error
    Path(upstream.notes.parent / f"signed-in-{transport}").touch()
    outcome = await host.call(server, "files", arguments, can_ask=True, answer=accepted(question, None))
    assert outcome.text == f"files of {transport}"


FORGED: list[Any] = [
    *(None, 7, [], {}, {"asked": 7}, {"open": {"a": 7}}, {"answers": 7, "open": [1]}),
    *({"open": {"a": [1]}}, {"open": {"a": ["x", [], ""]}}, {"answers": {"a": 1}, "open": {"a": ["x", {}, ""]}}),
    {"asked": "a", "open": {"a": ["x", {}, ""]}, "server_state": {"x": 1}},
]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("state", FORGED, ids=repr)
@pytest.mark.parametrize("transport", ["modern", "legacy"])
async def test_a_forged_state_only_asks_again(host: McpHost, upstream: Upstream, transport: str, state: Any) -> None:
    answer = UserAnswer(UserAction.ACCEPT, {"day": "Monday", "seats": 2}, state)
    outcome = await host.call(upstream.server(transport), "book", sent({"city": "Bonn"}), can_ask=True, answer=answer)
    assert question_of(outcome).message == "When do you travel to Bonn?"
