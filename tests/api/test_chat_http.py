"""Chat Completions over HTTP with a scripted generation service."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI

from tests.api.asgi import Exchange, mount
from tests.api.folding import fold
from tests.api.scripted import ScriptedTurns, call, commentary, final, finished, reasoning
from unisono.access.keys import NoKeys
from unisono.api.asgi_layers import asgi_layers
from unisono.api.chat.routes import CHAT, ChatModel, ChatRoute
from unisono.api.fastapi_app import register
from unisono.api.request_options import ReasoningField
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


def gateway(service: GenerationService, *, keep_alive_s: float = 10.0) -> FastAPI:
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
            service=service,
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
    service: GenerationService, *, path: str = "/v1/chat/completions", keep_alive_s: float = 10.0, **fields: Any
) -> Exchange:
    body = {"model": "gpt-oss-20b", "messages": [{"role": "user", "content": "Hi"}]} | fields
    return Exchange(gateway(service, keep_alive_s=keep_alive_s), "POST", path, json=body)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
async def test_a_request_gets_a_complete_response(path: str) -> None:
    service = ScriptedTurns([ANSWER], report=lambda: GenerationReport("vllm-1", 1, ["missing-end", "trailing-stop"]))
    response = await request(service, path=path).run()
    assert response.status == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-unisono-backend"] == "vllm-1"
    assert response.headers["x-unisono-recoveries"] == "missing-end,trailing-stop"
    assert response.headers["x-request-id"] == "req_0"
    body = response.json()
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


async def test_the_engine_receives_the_requested_settings() -> None:
    service = ScriptedTurns([ANSWER])
    await request(service, model="gpt-4o", reasoning_effort="high", max_tokens=9, stop="x", tools=[TOOL]).run()
    [generation] = service.turns
    assert (generation.model, generation.origin.tenant, generation.origin.request_id) == (
        "gpt-oss-20b",
        "local",
        "req_0",
    )
    assert generation.origin.caller == Caller("local", raw=True)
    assert (generation.answer.max_tokens, generation.answer.stop) == (9, ("x",))
    assert generation.conversation.items == (UserMessage("Hi"),)
    assert generation.conversation.preamble.effort is Effort.HIGH
    assert generation.conversation.preamble.date == "2026-11-20"
    assert [tool.name for tool in generation.conversation.preamble.tools] == ["f"]


async def test_the_response_carries_the_requested_model_name() -> None:
    assert (await request(ScriptedTurns([ANSWER]), model="gpt-4o").run()).json()["model"] == "gpt-4o"


async def test_a_response_without_recoveries_has_no_recoveries_header() -> None:
    response = await request(ScriptedTurns([ANSWER])).run()
    assert "x-unisono-recoveries" not in response.headers


async def test_a_stream_has_the_same_content_with_one_write_per_batch() -> None:
    batches: list[Any] = [[event] for event in ANSWER]
    complete = (await request(ScriptedTurns([ANSWER])).run()).json()["choices"]
    response = await request(ScriptedTurns(batches), stream=True).run()
    assert response.status == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["x-request-id"] == "req_0"
    visible = [event for event in ANSWER if isinstance(event, Delta)]
    assert len(response.bodies) == 1 + len(visible) + 1
    events = response.events()
    assert events[-1] == "[DONE]"
    [folded] = fold(events)
    for name in ("content", "reasoning", "reasoning_content", "role"):
        assert folded["message"][name] == complete[0]["message"][name]
    assert folded["finish_reason"] == complete[0]["finish_reason"]


async def test_a_model_setting_hides_reasoning() -> None:
    message = (await request(ScriptedTurns([ANSWER]), model="quiet").run()).json()["choices"][0]["message"]
    assert "reasoning" not in message
    assert "reasoning_content" not in message


async def test_tool_calls_are_buffered_unless_the_model_streams_arguments() -> None:
    for model, stream, buffered in [("gpt-oss-20b", True, True), ("early", True, False), ("early", False, True)]:
        service = ScriptedTurns([[*call(0, 0, "f", "{}"), finished()]])
        response = await request(service, model=model, stream=stream, tools=[TOOL]).run()
        assert service.turns[0].answer.hold_calls is buffered
        choice = fold(response.events())[0] if stream else response.json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"


async def test_several_choices_run_in_parallel() -> None:
    barrier = asyncio.Barrier(3)
    scripts: list[Any] = [
        [barrier, [*commentary(0, f"choice {n}"), finished(FinishReason.LENGTH if n else FinishReason.STOP)]]
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


async def test_choices_are_streamed_as_they_arrive() -> None:
    text = Text(0, Phase.FINAL)
    slow: list[Any] = [[Opened(text)], 0.05, [Delta(text, "slow"), finished()]]
    fast: list[Any] = [[Opened(text), Delta(text, "fast")], [finished()]]
    response = await request(ScriptedTurns(slow, fast), n=2, stream=True, stream_options={"include_usage": True}).run()
    events = response.events()
    contents = [
        choice["delta"]["content"]
        for chunk in events[:-2]
        for choice in chunk["choices"]
        if choice["delta"].get("content")
    ]
    assert contents == ["fast", "slow"]
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"]["completion_tokens"] == 14
    assert [choice["finish_reason"] for choice in fold(events)] == ["stop", "stop"]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "no stream"])
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
    service = ScriptedTurns([0.01, error])
    response = await request(service, stream=stream).run()
    assert response.status == status
    assert response.headers["content-type"] == "application/json"
    assert b"secret" not in response.body
    assert service.runs[0].closed == 1


async def test_a_failure_during_a_stream_ends_it_without_done() -> None:
    batch: list[Event] = [Opened(Reasoning(0)), Delta(Reasoning(0), "hm")]
    response = await request(ScriptedTurns([batch, BackendUnavailable("died")]), stream=True).run()
    events = response.events()
    assert events[-1]["error"]["code"] == "backend_unavailable"
    assert "[DONE]" not in events
    assert all(choice["finish_reason"] is None for chunk in events[:-1] for choice in chunk["choices"])
    assert response.complete


async def test_a_failure_after_the_first_batch_is_an_http_error_without_streaming() -> None:
    batch: list[Event] = [Opened(Reasoning(0)), Delta(Reasoning(0), "hm")]
    response = await request(ScriptedTurns([batch, BackendUnavailable("died")])).run()
    assert response.status == 503


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "no stream"])
async def test_a_failing_choice_fails_the_request_and_closes_all_choices(stream: bool) -> None:
    service = ScriptedTurns([60.0], [BackendUnavailable("no")], [60.0])
    response = await asyncio.wait_for(request(service, n=3, stream=stream).run(), 2)
    assert response.status == 503
    assert [run.closed for run in service.runs] == [1, 1, 1]
    assert service.runs[0].cancelled
    assert service.runs[2].cancelled


HALF: list[Event] = [Opened(Reasoning(0)), Delta(Reasoning(0), "hm")]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "no stream"])
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("script", [[60.0], [HALF, 60.0]], ids=["before the first token", "during the response"])
async def test_a_client_disconnect_cancels_all_choices_at_once(script: Any, choices: int, stream: bool) -> None:
    service = ScriptedTurns(script)
    response = request(service, n=choices, stream=stream).start()
    await asyncio.sleep(0.05)
    assert len(service.runs) == choices
    response.leave()
    await response.ended(within_s=1.0)
    assert all(run.cancelled and run.closed for run in service.runs)


async def test_keep_alives_are_sent_while_a_tool_call_is_buffered() -> None:
    call_events = call(0, 0, "f", '{"a":1}')
    script: list[Any] = [call_events[:1], 0.1, [*call_events[1:], finished()]]
    response = await request(ScriptedTurns(script), stream=True, keep_alive_s=0.02, tools=[TOOL]).run()
    assert response.bodies.count(b": keep-alive\n\n") >= 2
    [choice] = fold(response.events())
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}


REFUSED: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "invalid field": ({"temperature": 3}, 400, "temperature"),
    "unsupported content part": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        400,
        "messages.0.content.1.type",
    ),
    "unknown tool call id": (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": ""}}]},
                {"role": "tool", "tool_call_id": "x", "content": ""},
            ]
        },
        400,
        "messages.1.tool_call_id",
    ),
    "unknown model": ({"model": "gpt-9"}, 404, "model"),
    "run that cannot be tokenized": (
        {"messages": [{"role": "user", "content": " " * 600_000}]},
        400,
        "messages.0.content",
    ),
}


@pytest.mark.parametrize(("fields", "status", "param"), REFUSED.values(), ids=REFUSED)
async def test_an_invalid_request_starts_no_generation(fields: dict[str, Any], status: int, param: str | None) -> None:
    service = ScriptedTurns([ANSWER])
    response = await request(service, **fields).run()
    assert response.status == status
    assert response.json()["error"]["param"] == param
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert service.runs == []


async def test_only_post_is_allowed() -> None:
    response = await Exchange(gateway(ScriptedTurns([ANSWER])), "GET", "/v1/chat/completions").run()
    assert response.status == 405
    assert response.json()["error"]["code"] == "method_not_allowed"


async def test_no_task_is_left_running() -> None:
    before = asyncio.all_tasks()
    for script in ([ANSWER], [BackendUnavailable("no")], [HALF, BackendUnavailable("no")]):
        for stream in (True, False):
            await request(ScriptedTurns(script), n=2, stream=stream).run()
    assert asyncio.all_tasks() == before
