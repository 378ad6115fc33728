"""Failover within an answer: another deployment continues it, also of another kind."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from itertools import groupby
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway, config_of, gateway, message_of
from tests.e2e.messages import message_of as in_messages
from tests.e2e.messages import of_chat
from tests.e2e.playing import Play, fake_of, staged
from tests.e2e.responses import streamed
from tests.fakes import FakeVllm, Refusal, VllmScript, close_at, half_event_at, inject_at, reset_at, stall_at
from tests.fakes.faults import Fault
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
THINKS = (
    "<|channel|>analysis<|message|>Think first, of 🐦‍⬛ and of more than one thing.<|end|><|start|>assistant"
    "<|channel|>final<|message|>Then answer in full: naïve, 日本 and “quoted”, to the end.<|return|>"
)
CALLS = (
    "<|channel|>analysis<|message|>I look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"text": "naïve \\"q\\" 日本", "n": [1, 2, 3]}<|call|>'
)
SCRIPTS = {"reasoning and text": THINKS, "tool call": CALLS}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
GARBAGE = b'data: {"id": garbage\n\n'
ERROR = b'data: {"error": {"message": "CUDA error", "type": "InternalServerError", "code": 500}}\n\n'
SHORT = ENCODING.encode_marked("<|channel|>final<|message|>Then answer in full.<|return|>")
PAIRS = [
    ("vllm", "llamacpp"),
    ("llamacpp", "mlx_server"),
    ("mlx_server", "ollama"),
    ("ollama", "sglang"),
    ("sglang", "vllm"),
    ("mlx_server", "vllm"),
]
FAULTS: dict[str, Callable[[int], Fault]] = {
    "reset": reset_at,
    "connection closed": close_at,
    "half an event": half_event_at,
    "garbage": lambda k: inject_at(k, GARBAGE),
    "error event": lambda k: inject_at(k, ERROR),
}
# No cooldown: a failed deployment is used again at once.
NO_COOLDOWN = {"allowed_fails": 100_000, "cooldown_time": 0.01}


def config(*deployments: str, **unisono: Any) -> dict[str, Any]:
    config = config_of(*deployments, router_settings=NO_COOLDOWN)
    for entry in config["model_list"]:
        entry["unisono"] = unisono
        entry["litellm_params"] |= {"stream_timeout": 0.3}
    return config


def stage(*kinds: str, **unisono: Any) -> AbstractAsyncContextManager[tuple[Play, Gateway]]:
    return staged(THINKS, kinds, config, **unisono)


def essence(answer: Answer) -> tuple[Any, ...]:
    message = message_of(answer)
    return message.reasoning, message.content, message.calls, message.finish_reason


@pytest.mark.sampled(one_in=12)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
async def test_interrupted_answer_continues_on_another_backend(pair: tuple[str, str], fault: str) -> None:
    async with stage(*pair) as (play, running):
        for script in SCRIPTS.values():
            play.script = script
            fields: dict[str, Any] = {"tools": [TOOL], "stream_options": {"include_usage": True}}
            whole = message_of(await running.chat(stream=True, **fields))
            for position in (1, 4, 9, 14, 20):
                for stream in (True, False):
                    play.asked.clear()
                    play.failures = [FAULTS[fault](position)]
                    answer = await running.chat(stream=stream, **(fields if stream else {"tools": [TOOL]}))
                    assert answer.status == 200, answer.raw
                    message = message_of(answer)
                    assert essence(answer) == (whole.reasoning, whole.content, whole.calls, whole.finish_reason)
                    assert message.note["failovers"] == 1
                    # One kind needs two requests to continue within a message.
                    assert sorted(kind for kind, _ in groupby(play.asked)) == sorted(pair)
                    assert abs(message.usage["completion_tokens"] - whole.usage["completion_tokens"]) <= 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_prompt_too_long_for_one_deployment_goes_to_a_larger_one(stream: bool) -> None:
    long = [{"role": "user", "content": "word " * 300}]
    async with (
        FakeVllm(tokens=SHORT, context=200) as small,
        FakeVllm(tokens=SHORT, context=4096) as large,
        gateway(config_of(f"vllm@{small.url}", f"vllm@{large.url}")) as running,
    ):
        for _ in range(2):
            answer = await running.chat(messages=long, stream=stream)
            assert message_of(answer).content == "Then answer in full."
        assert not [request for request in small.requests if request.method == "POST" and request.json.get("stream")]


async def test_prompt_too_long_for_all_deployments_is_a_400() -> None:
    long = [{"role": "user", "content": "word " * 300}]
    async with (
        FakeVllm(tokens=SHORT, context=200) as first,
        FakeVllm(tokens=SHORT, context=200) as second,
        gateway(config_of(f"vllm@{first.url}", f"vllm@{second.url}")) as running,
    ):
        answer = await running.chat(messages=long)
        assert (answer.status, answer.body["error"]["code"]) == (400, "context_length_exceeded")


async def test_answer_continues_through_all_backend_kinds() -> None:
    kinds = ("vllm", "llamacpp", "sglang", "mlx_server", "ollama")
    async with stage(*kinds) as (play, running):
        for script in SCRIPTS.values():
            play.script = script
            whole = essence(await running.chat(stream=True, tools=[TOOL]))
            for first in (2, 5):
                play.failures = [reset_at(first), close_at(4), half_event_at(3), Refusal(503, b"{}")]
                play.asked.clear()
                answer = await running.chat(stream=True, tools=[TOOL])
                assert "error" not in answer.events[-1], answer.events[-1]
                assert essence(answer) == whole
                assert message_of(answer).note["failovers"] == 4
                assert sorted(kind for kind, _ in groupby(play.asked)) == sorted(kinds)


async def test_silent_backend_is_abandoned_after_its_time_limit() -> None:
    async with stage("vllm", "mlx_server", first_token_timeout_s=0.3) as (play, running):
        whole = essence(await running.chat(stream=True))
        for position in (0, 6):
            play.failures = [stall_at(position)]
            started = time.monotonic()
            answer = await running.chat(stream=True)
            assert essence(answer) == whole
            assert message_of(answer).note["failovers"] == 1
            assert 0.25 < time.monotonic() - started < 5.0


async def test_responses_continue_streamed_whole_and_in_the_background() -> None:
    async with stage("vllm", "mlx_server", "llamacpp") as (play, running):
        for script in SCRIPTS.values():
            play.script = script
            body = {"model": "gpt-oss", "input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": {}}]}
            whole = content_of((await running.post("/v1/responses", json.dumps(body).encode())).body)
            for stream, background in ((True, False), (False, False), (True, True)):
                play.failures = [reset_at(3), reset_at(5)]
                fields = {**body, "stream": stream, "background": background}
                answer = await running.post("/v1/responses", json.dumps(fields).encode())
                response = streamed(answer).last if stream else answer.body
                assert content_of(response) == whole
                assert response["unisono"]["failovers"] == 2
                assert response["status"] == "completed"
                stored = (await running.get(f"/v1/responses/{response['id']}")).body
                assert content_of(stored) == whole
                if not stream:
                    assert answer.headers["x-unisono-failovers"] == "2"


def content_of(response: Any) -> list[Any]:
    """Return the content of a response without ids."""
    items = response["output"]
    return [(i["type"], i.get("content"), i.get("arguments"), i.get("name")) for i in items]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_messages_continue_on_another_backend(stream: bool) -> None:
    async with stage("vllm", "mlx_server", "llamacpp") as (play, running):
        for script in SCRIPTS.values():
            play.script = script
            body = of_chat({"tools": [TOOL], "stream": stream})
            whole = in_messages(await running.messages(**body))
            play.failures = [reset_at(3), reset_at(5)]
            answer = await running.messages(**body)
            message = in_messages(answer)
            assert (message.reasoning, message.content, message.calls) == (whole.reasoning, whole.content, whole.calls)
            assert message.note["failovers"] == 2
            if not stream:
                assert answer.headers["x-unisono-failovers"] == "2"


async def test_failed_messages_stream_ends_with_an_error_and_an_open_block() -> None:
    async with stage("vllm", failover=False) as (play, running):
        play.failures = [reset_at(12)]
        answer = await running.messages(stream=True, thinking={"type": "adaptive"})
        assert answer.events[-1]["type"] == "error"
        assert answer.events[-1]["error"]["type"] in ("overloaded_error", "api_error")
        kinds = [event["type"] for event in answer.events]
        assert kinds.count("content_block_start") > kinds.count("content_block_stop")
        assert "message_delta" not in kinds


async def test_interrupted_stream_ends_with_an_error_if_failover_is_disabled() -> None:
    async with stage("vllm", "llamacpp", failover=False) as (play, running):
        play.failures = [reset_at(12)]
        answer = await running.chat(stream=True)
        assert answer.events[-1]["error"]["code"] in ("backend_unavailable", "backend_protocol_error")
        assert len(play.asked) == 1
        play.failures = [reset_at(12)]
        message = message_of(await running.chat())
        assert (message.note["failovers"], message.finish_reason) == (1, "stop")


async def test_interrupted_stream_ends_with_an_error_without_another_backend() -> None:
    async with stage("vllm", "llamacpp") as (play, running):
        whole = message_of(await running.chat(stream=True))
        play.failures = [reset_at(6), *[Refusal(503, b"{}")] * 8]
        answer = await running.chat(stream=True)
        assert answer.events[-1]["error"]["type"] == "server_error"
        visible = "".join(c["delta"].get("reasoning") or "" for e in answer.events[:-1] for c in e["choices"])
        assert visible
        assert (whole.reasoning or "").startswith(visible)
        assert answer.events[-1]["unisono"]["backend"]
        play.failures = [reset_at(6), *[Refusal(503, b"{}")] * 8]
        events = (await running.chat(stream=True, stream_options={"include_usage": True})).events
        assert (events[-2]["choices"], set(events[-1])) == ([], {"error"})
        assert events[-2]["usage"]["completion_tokens"] == 6
        assert events[-2]["usage"]["prompt_tokens"] > 6
        assert events[-2]["unisono"].keys() == answer.events[-1]["unisono"].keys()


async def test_text_that_spells_a_marker_continues_only_on_ids_backends() -> None:
    """A text backend could not distinguish it from the real marker."""
    output = [
        *ENCODING.encode_marked("<|channel|>final<|message|>"),
        *ENCODING.encode_text("The <|end|> is text here."),
    ]

    def rest(body: dict[str, Any]) -> VllmScript:
        prompt = body["prompt"]
        remaining = next(output[at:] for at in range(len(output), -1, -1) if prompt[len(prompt) - at :] == output[:at])
        is_interrupted = remaining == output and len(first.requests) + len(second.requests) == 1
        return VllmScript(tokens=[*remaining, 200002], faults=(reset_at(len(output) - 2),) if is_interrupted else ())

    async with FakeVllm(script=rest) as first, FakeVllm(script=rest) as second, fake_of("ollama") as text:
        text.script = lambda _: Refusal(503, b"{}")
        async with gateway(config(f"vllm@{first.url}", f"ollama@{text.url}", f"vllm@{second.url}")) as running:
            answer = await running.chat(stream=True)
            assert message_of(answer).content == "The <|end|> is text here."
            assert message_of(answer).note["failovers"] in (1, 2)
            assert not [seen for seen in text.requests if "The <" in seen.json["prompt"]]
