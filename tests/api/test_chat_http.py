"""Chat Completions over HTTP, in front of an engine that plays a script."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI

from tests.api.asgi import Exchange
from tests.api.folding import fold
from tests.api.scripted import ScriptedTurns, call, commentary, final, finished, reasoning
from unisono.access.keys import NoKeys
from unisono.api.asgi_layers import asgi_layers
from unisono.api.chat.routes import CHAT, ChatModel, ChatRoute
from unisono.api.error_responses import register
from unisono.api.reasoning import ReasoningField
from unisono.api.route_table import mount
from unisono.core.access import Caller
from unisono.core.conversation import Effort, Phase, UserMessage
from unisono.core.events import Delta, Event, Opened, Reasoning, Text
from unisono.core.generation import FinishReason
from unisono.engine.request import GenerationReport, GenerationService
from unisono.errors import BackendOverloaded, BackendTimeout, BackendUnavailable, ContextTooLong, UnknownModel

MODELS = {
    "gpt-oss-20b": ChatModel("gpt-oss-20b"),
    "gpt-4o": ChatModel("gpt-oss-20b"),
    "quiet": ChatModel("gpt-oss-20b", ReasoningField.NONE),
    "early": ChatModel("gpt-oss-20b", stream_tool_arguments=True),
}
ANSWER: list[Event] = [*reasoning(0, "hm"), *final(1, "Hel", "lo"), finished()]
TOOL = {"type": "function", "function": {"name": "f"}}


def resolve(name: str, _: Caller) -> ChatModel:
    if name not in MODELS:
        raise UnknownModel(f"There is no model '{name}'.", param="model")
    return MODELS[name]


def gateway(turns: GenerationService, *, keep_alive_s: float = 10.0) -> FastAPI:
    ids = iter(range(1000))
    app = FastAPI(
        docs_url=None,
        openapi_url=None,
        middleware=asgi_layers(authenticate=NoKeys().identify, keyless=True, new_id=lambda: str(next(ids))),
    )
    register(app)
    mount(
        app,
        CHAT.routes,
        ChatRoute(
            service=turns,
            resolve=resolve,
            today=lambda: "2026-11-20",
            new_id=lambda: "abc",
            clock=lambda: 1700000000.7,
            fingerprint="fp_1",
            keep_alive_s=keep_alive_s,
        ),
    )
    return app


def request(
    turns: GenerationService, *, path: str = "/v1/chat/completions", keep_alive_s: float = 10.0, **fields: Any
) -> Exchange:
    body = {"model": "gpt-oss-20b", "messages": [{"role": "user", "content": "Hi"}]} | fields
    return Exchange(gateway(turns, keep_alive_s=keep_alive_s), "POST", path, json=body)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
async def test_a_question_is_answered(path: str) -> None:
    turns = ScriptedTurns([ANSWER], report=lambda: GenerationReport("vllm-1", 1, ["missing-end", "trailing-stop"]))
    answer = await request(turns, path=path).run()
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-unisono-backend"] == "vllm-1"
    assert answer.headers["x-unisono-recoveries"] == "missing-end,trailing-stop"
    assert answer.headers["x-request-id"] == "req_0"
    body = answer.json()
    assert (body["id"], body["created"], body["model"]) == ("chatcmpl-abc", 1700000000, "gpt-oss-20b")
    [choice] = body["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "Hello"
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] == "hm"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert body["unisono"] == {
        "recoveries": ["missing-end", "trailing-stop"],
        "failovers": 1,
        "backend": "vllm-1",
    }


async def test_the_engine_is_asked_for_what_the_client_wants() -> None:
    turns = ScriptedTurns([ANSWER])
    await request(turns, model="gpt-4o", reasoning_effort="high", max_tokens=9, stop="x", tools=[TOOL]).run()
    [turn] = turns.turns
    assert (turn.model, turn.tenant, turn.request_id) == ("gpt-oss-20b", "local", "req_0")
    assert turn.caller == Caller("local", raw=True)
    assert (turn.max_tokens, turn.stop) == (9, ("x",))
    assert turn.conversation.items == (UserMessage("Hi"),)
    assert turn.conversation.preamble.effort is Effort.HIGH
    assert turn.conversation.preamble.date == "2026-11-20"
    assert [tool.name for tool in turn.conversation.preamble.tools] == ["f"]


async def test_the_answer_carries_the_name_that_was_asked_for() -> None:
    assert (await request(ScriptedTurns([ANSWER]), model="gpt-4o").run()).json()["model"] == "gpt-4o"


async def test_without_a_repair_there_is_no_header() -> None:
    answer = await request(ScriptedTurns([ANSWER])).run()
    assert "x-unisono-recoveries" not in answer.headers


async def test_a_stream_says_the_same_with_one_write_per_batch() -> None:
    batches: list[Any] = [[event] for event in ANSWER]
    whole = (await request(ScriptedTurns([ANSWER])).run()).json()["choices"]
    answer = await request(ScriptedTurns(batches), stream=True).run()
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-request-id"] == "req_0"
    visible = [event for event in ANSWER if isinstance(event, Delta)]
    assert len(answer.bodies) == 1 + len(visible) + 1
    events = answer.events()
    assert events[-1] == "[DONE]"
    [folded] = fold(events)
    for name in ("content", "reasoning", "reasoning_content", "role"):
        assert folded["message"][name] == whole[0]["message"][name]
    assert folded["finish_reason"] == whole[0]["finish_reason"]


async def test_reasoning_may_be_hidden_by_the_model_setting() -> None:
    message = (await request(ScriptedTurns([ANSWER]), model="quiet").run()).json()["choices"][0]["message"]
    assert "reasoning" not in message
    assert "reasoning_content" not in message


async def test_calls_are_held_unless_the_model_says_otherwise() -> None:
    for model, stream, held in [("gpt-oss-20b", True, True), ("early", True, False), ("early", False, True)]:
        turns = ScriptedTurns([[*call(0, 0, "f", "{}"), finished()]])
        answer = await request(turns, model=model, stream=stream, tools=[TOOL]).run()
        assert turns.turns[0].hold_calls is held
        choice = fold(answer.events())[0] if stream else answer.json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"


async def test_several_choices_run_at_once() -> None:
    together = asyncio.Barrier(3)
    scripts: list[Any] = [
        [together, [*commentary(0, f"choice {n}"), finished(FinishReason.LENGTH if n else FinishReason.STOP)]]
        for n in range(3)
    ]
    async with asyncio.timeout(10):
        body = (await request(ScriptedTurns(*scripts), n=3).run()).json()
    assert [(choice["index"], choice["message"]["content"]) for choice in body["choices"]] == [
        (0, "choice 0"),
        (1, "choice 1"),
        (2, "choice 2"),
    ]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length", "length"]
    assert body["usage"]["prompt_tokens"] == 11
    assert body["usage"]["completion_tokens"] == 21


async def test_choices_are_streamed_as_they_come() -> None:
    text = Text(0, Phase.FINAL)
    slow: list[Any] = [[Opened(text)], 0.05, [Delta(text, "slow"), finished()]]
    fast: list[Any] = [[Opened(text), Delta(text, "fast")], [finished()]]
    answer = await request(ScriptedTurns(slow, fast), n=2, stream=True, stream_options={"include_usage": True}).run()
    events = answer.events()
    shown = [
        choice["delta"]["content"]
        for chunk in events[:-2]
        for choice in chunk["choices"]
        if choice["delta"].get("content")
    ]
    assert shown == ["fast", "slow"]
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"]["completion_tokens"] == 14
    assert [choice["finish_reason"] for choice in fold(events)] == ["stop", "stop"]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BackendUnavailable("no backend"), 503),
        (BackendOverloaded("busy", retry_after_s=3), 503),
        (BackendTimeout("silent"), 504),
        (ContextTooLong("too long", param="messages"), 400),
        (RuntimeError("the secret"), 500),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_a_failure_before_the_first_batch_is_an_http_error(error: Exception, status: int, stream: bool) -> None:
    turns = ScriptedTurns([0.01, error])
    answer = await request(turns, stream=stream).run()
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert b"secret" not in answer.body
    assert turns.runs[0].closed == 1


async def test_a_failure_amid_a_stream_ends_it_without_done() -> None:
    batch: list[Event] = [Opened(Reasoning(0)), Delta(Reasoning(0), "hm")]
    answer = await request(ScriptedTurns([batch, BackendUnavailable("died")]), stream=True).run()
    events = answer.events()
    assert events[-1]["error"]["code"] == "backend_unavailable"
    assert "[DONE]" not in events
    assert all(choice["finish_reason"] is None for chunk in events[:-1] for choice in chunk["choices"])
    assert answer.complete


async def test_a_failure_amid_a_whole_answer_is_an_error() -> None:
    batch: list[Event] = [Opened(Reasoning(0)), Delta(Reasoning(0), "hm")]
    answer = await request(ScriptedTurns([batch, BackendUnavailable("died")])).run()
    assert answer.status == 503


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_one_failing_choice_fails_all_and_frees_all(stream: bool) -> None:
    turns = ScriptedTurns([60.0], [BackendUnavailable("no")], [60.0])
    answer = await asyncio.wait_for(request(turns, n=3, stream=stream).run(), 2)
    assert answer.status == 503
    assert [run.closed for run in turns.runs] == [1, 1, 1]
    assert turns.runs[0].cancelled
    assert turns.runs[2].cancelled


HALF: list[Event] = [Opened(Reasoning(0)), Delta(Reasoning(0), "hm")]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("script", [[60.0], [HALF, 60.0]], ids=["before the first token", "amid the answer"])
async def test_a_client_that_leaves_frees_the_backend_at_once(script: Any, choices: int, stream: bool) -> None:
    turns = ScriptedTurns(script)
    answer = request(turns, n=choices, stream=stream).start()
    await asyncio.sleep(0.05)
    assert len(turns.runs) == choices
    answer.leave()
    await answer.ended(within_s=1.0)
    assert all(run.cancelled and run.closed for run in turns.runs)


async def test_a_held_call_is_bridged_by_keep_alives() -> None:
    opened = call(0, 0, "f", '{"a":1}')
    script: list[Any] = [opened[:1], 0.1, [*opened[1:], finished()]]
    answer = await request(ScriptedTurns(script), stream=True, keep_alive_s=0.02, tools=[TOOL]).run()
    assert answer.bodies.count(b": keep-alive\n\n") >= 2
    [choice] = fold(answer.events())
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}


REFUSED: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "a field": ({"temperature": 3}, 400, "temperature"),
    "a part": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        400,
        "messages.0.content.1.type",
    ),
    "a reference": (
        {"messages": [{"role": "tool", "tool_call_id": "x", "content": ""}]},
        400,
        "messages.0.tool_call_id",
    ),
    "the model": ({"model": "gpt-9"}, 404, "model"),
    "a run": ({"messages": [{"role": "user", "content": " " * 600_000}]}, 400, "messages.0.content"),
}


@pytest.mark.parametrize(("fields", "status", "param"), REFUSED.values(), ids=REFUSED)
async def test_a_bad_request_starts_nothing(fields: dict[str, Any], status: int, param: str | None) -> None:
    turns = ScriptedTurns([ANSWER])
    answer = await request(turns, **fields).run()
    assert answer.status == status
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert turns.runs == []


async def test_only_post_is_allowed() -> None:
    answer = await Exchange(gateway(ScriptedTurns([ANSWER])), "GET", "/v1/chat/completions").run()
    assert answer.status == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"


async def test_nothing_is_left_running_whatever_happened() -> None:
    before = asyncio.all_tasks()
    for script in ([ANSWER], [BackendUnavailable("no")], [HALF, BackendUnavailable("no")]):
        for stream in (True, False):
            await request(ScriptedTurns(script), n=2, stream=stream).run()
    assert asyncio.all_tasks() == before
