"""Chat Completions of models without Harmony, passed to the API of the backend unchanged."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway, gateway
from tests.fakes import FakeVllm, Refusal, VllmScript, close_at, reset_at, stall_at
from tests.fakes.dialects import sse_event
from tests.fakes.faults import Fault, inject_at, without_done
from tests.fakes.openai_api import FakeOpenAi, OpenAiScript
from tests.fakes.wire import Sleep, Stall, Step, Write
from unisono.core.passthrough_request import named, starred
from unisono.harmony.encoding import load_encoding
from unisono_adapters._http import LINGER_S

KINDS = ("vllm", "sglang", "llamacpp", "ollama", "mlx_server")
ANSWER = OpenAiScript()
HARMONY = load_encoding().encode_marked("<|channel|>final<|message|>Harmony.<|return|>")


def oss_entry(base: str, name: str) -> dict[str, Any]:
    return {**entry(base, "vllm/tiny", name=name), "model_info": {"harmony": True}}


def entry(base: str, model: str = "vllm/qwen", *, name: str = "other", **params: Any) -> dict[str, Any]:
    return {"model_name": name, "litellm_params": {"model": model, "api_base": base, **params}}


@asynccontextmanager
async def served(*entries: dict[str, Any], **sections: Any) -> AsyncIterator[Gateway]:
    async with gateway({"model_list": list(entries), **sections}) as running:
        assert running.app is not None
        await running.app.state.gateway.pool.wait_for_probes(5)
        yield running


@asynccontextmanager
async def passed(
    script: OpenAiScript | Refusal | Callable[[Any], OpenAiScript | Refusal] = ANSWER, **sections: Any
) -> AsyncIterator[tuple[Gateway, FakeOpenAi]]:
    async with FakeOpenAi(script) as fake, served(entry(fake.url), **sections) as running:
        yield running, fake


def text_of(answer: Answer) -> str:
    return "".join(c["delta"].get("content") or "" for event in answer.events for c in event["choices"])


# -- unchanged

ODD = {
    "temperature": 0.3,
    "logprobs": True,
    "top_k": 7,
    "nobody_knows": {"this": [1, None, "field"]},
    "messages": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
        {"role": "weird", "content": 5},
    ],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_body_is_forwarded_unchanged_except_for_the_model(kind: str, stream: bool) -> None:
    async with FakeOpenAi() as fake, served(entry(fake.url + "/v1", f"{kind}/qwen:7b")) as running:
        answer = await running.chat(model="other", stream=stream, **ODD)
    name = "default_model" if kind == "mlx_server" else "qwen:7b"
    [request] = fake.requests
    body = request.json
    assert answer.status == 200, answer.raw
    assert request.path == "/v1/chat/completions"
    if stream:
        assert body.pop("stream_options") == {"include_usage": True}
    assert body == {**ODD, "model": name, "stream": stream}
    assert "authorization" not in request.headers


@pytest.mark.parametrize("model", ["other", "oss"], ids=["requested", "fallback"])
async def test_fields_for_the_gateway_are_not_forwarded(model: str) -> None:
    fields = {"unisono": {"run_tools": False}, "tags": ["batch"], "litellm_metadata": {"a": "b"}, "temperature": 0.5}
    async with FakeVllm(script=lambda _: SERVER_ERROR) as oss, FakeOpenAi() as other:
        settings = {"fallbacks": [{"oss": ["other"]}]}
        async with served(oss_entry(oss.url, "oss"), entry(other.url), router_settings=settings) as running:
            answer = await running.chat(model=model, **fields)
    assert answer.status == 200, answer.raw
    [request] = other.requests
    assert fields.keys() & request.json == {"temperature"}
    assert "tags" in answer.headers["x-unisono-notes"].split(", ")


async def test_a_response_is_returned_unchanged_except_for_the_model() -> None:
    extra = {"system_fingerprint": "there", "service_tier": "default", "unknown": [1.5, {"a": None}]}
    script = OpenAiScript(extra=extra)
    async with passed(script) as (running, _fake):
        answer = await running.chat(model="other")
    message = {"role": "assistant", "content": "Four."}
    assert answer.body == {
        "id": "chatcmpl-there",
        "object": "chat.completion",
        "created": 1,
        "model": "other",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": script.usage,
        **extra,
    }
    assert answer.headers["x-unisono-backend"] == "vllm-1"
    assert "x-request-id" in answer.headers


async def test_a_stream_is_returned_event_by_event_with_the_requested_model() -> None:
    async with passed() as (running, _fake):
        answer = await running.chat(model="other", stream=True)
    assert text_of(answer) == "Four."
    assert {event["model"] for event in answer.events} == {"other"}
    assert {event["id"] for event in answer.events} == {"chatcmpl-there"}
    assert answer.done
    assert len(answer.events) == 4


USAGES: dict[str, tuple[dict[str, Any], bool]] = {
    "default": ({}, False),
    "requested": ({"stream_options": {"include_usage": True}}, True),
    "declined": ({"stream_options": {"include_usage": False, "other": 1}}, False),
}


@pytest.mark.parametrize(("fields", "shown"), USAGES.values(), ids=USAGES)
async def test_usage_is_always_requested_but_sent_only_on_request(fields: dict[str, Any], shown: bool) -> None:
    async with passed() as (running, fake):
        answer = await running.chat(model="other", stream=True, **fields)
    assert fake.requests[0].json["stream_options"] == {**fields.get("stream_options", {}), "include_usage": True}
    assert any("usage" in event for event in answer.events) is shown
    assert all(event["choices"] for event in answer.events) is not shown


async def test_events_are_forwarded_while_the_backend_generates() -> None:
    async with passed(OpenAiScript(words=("a", "b"), delay_s=0.4)) as (running, fake):
        body = {"model": "other", "stream": True, "messages": []}
        async with running.session.post(running.url + "/v1/chat/completions", json=body) as response:
            first = await response.content.readuntil(b"\n\n")
            assert json.loads(first.removeprefix(b"data: "))["id"] == "chatcmpl-there"
            assert fake.requests[0].done_at is None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_disconnect_ends_the_backend_request(stream: bool) -> None:
    async with passed(OpenAiScript(words=("a",) * 50, delay_s=0.2)) as (running, fake):
        body = {"model": "other", "stream": stream, "messages": []}
        task = asyncio.ensure_future(running.post("/v1/chat/completions", json.dumps(body).encode()))
        await fake.asked()
        task.cancel()
        await fake.gone()


# -- refusals and failures

REFUSED: dict[str, tuple[Refusal, int, str, str]] = {
    "invalid request": (
        Refusal(400, b'{"error": {"message": "temperature is odd", "type": "x"}}'),
        400,
        "backend_rejected_request",
        "temperature is odd",
    ),
    "context too long": (
        Refusal(400, b'{"error": {"message": "maximum context length is 10 tokens"}}'),
        400,
        "context_length_exceeded",
        "maximum context length",
    ),
    "invalid gateway key": (Refusal(401, b'{"error": "bad key sk-secret"}'), 503, "backend_unavailable", ""),
    "overloaded": (Refusal(429, b"{}", headers={"Retry-After": "7"}), 503, "backend_overloaded", ""),
    "server error": (Refusal(500, b"trace at /home/somebody"), 502, "backend_error", ""),
    "invalid JSON": (Refusal(200, b"<html>"), 502, "backend_protocol_error", ""),
    "error with status 200": (
        Refusal(200, b'{"error": {"message": "no", "code": 400}}'),
        400,
        "backend_rejected_request",
        "",
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("refusal", "status", "code", "says"), REFUSED.values(), ids=REFUSED)
async def test_server_failures_become_backend_errors(
    refusal: Refusal, status: int, code: str, says: str, stream: bool
) -> None:
    async with passed(refusal, router_settings={"num_retries": 0}) as (running, _fake):
        answer = await running.chat(model="other", stream=stream)
    error = answer.body["error"]
    assert (answer.status, error["code"]) == (status, code)
    assert says in error["message"]
    assert error["param"] == ("messages" if code == "context_length_exceeded" else None)
    assert "sk-secret" not in answer.raw.decode()
    assert "/home" not in answer.raw.decode()


BREAKS: dict[str, tuple[Fault, str]] = {
    "reset": (reset_at(2), "backend_protocol_error"),
    "cut": (close_at(2), "backend_protocol_error"),
    "garbage": (inject_at(2, b"data: garbage\n\n"), "backend_protocol_error"),
    "error event": (inject_at(2, b'data: {"error": {"message": "lost"}}\n\n'), "backend_protocol_error"),
    "error event with 400": (inject_at(2, b'data: {"error": {"message": "lost", "code": 400}}\n\n'), "backend_error"),
}


@pytest.mark.parametrize(("fault", "code"), BREAKS.values(), ids=BREAKS)
async def test_a_broken_stream_ends_with_an_error_and_without_done(fault: Fault, code: str) -> None:
    async with passed(OpenAiScript(words=("a", "b", "c"), delay_s=0.02, faults=(fault,))) as (running, _fake):
        answer = await running.chat(model="other", stream=True)
    assert answer.status == 200
    assert answer.events[-1]["error"]["code"] == code
    assert not answer.done


def choice_event(index: int, text: str, finish: str | None = None) -> Step:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
    return Write(sse_event({"choices": [choice]}), framed=True)


# Events of a stream with `n: 2` whose second choice is not complete.
CUT_CHOICES = {
    "both choices at once": [choice_event(0, "a"), choice_event(1, "b"), choice_event(0, "", "stop")],
    "one choice after the other": [choice_event(0, "a"), choice_event(0, "", "stop")],
}


@pytest.mark.parametrize("events", CUT_CHOICES.values(), ids=CUT_CHOICES)
async def test_a_stream_that_breaks_off_in_its_second_choice_ends_with_an_error(events: list[Step]) -> None:
    def cut(steps: list[Step]) -> list[Step]:
        return events

    async with passed(OpenAiScript(faults=(cut,))) as (running, _fake):
        answer = await running.chat(model="other", stream=True, n=2)
    assert answer.events[-1]["error"]["code"] == "backend_protocol_error"
    assert not answer.done


async def test_a_server_may_ignore_the_number_of_choices() -> None:
    async with passed() as (running, _fake):
        answer = await running.chat(model="other", stream=True, n=2)
    assert (text_of(answer), answer.done) == ("Four.", True)


@pytest.mark.parametrize("shows_usage", [False, True])
async def test_a_stream_ends_although_the_backend_delays_done(shows_usage: bool) -> None:
    script = OpenAiScript(faults=(stall_at(5),))
    options = {"stream_options": {"include_usage": True}} if shows_usage else {}
    # The limit here is far below the time for which a backend may be silent.
    async with passed(script) as (running, _fake), asyncio.timeout(10):
        answer = await running.chat(model="other", stream=True, **options)
    assert (text_of(answer), answer.done) == ("Four.", True)
    assert any(event.get("usage") == script.usage for event in answer.events) is shows_usage


async def test_a_stream_without_done_ends_at_its_finish_reason() -> None:
    async with passed(OpenAiScript(faults=(without_done,))) as (running, _fake):
        answer = await running.chat(model="other", stream=True)
    assert (text_of(answer), answer.done) == ("Four.", True)


WRONG: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "unknown model": ({"model": "nobody"}, 404, "model"),
    "invalid stream value": ({"model": "other", "stream": "yes"}, 400, "stream"),
}


@pytest.mark.parametrize(("fields", "status", "param"), WRONG.values(), ids=WRONG)
async def test_only_an_invalid_model_or_stream_field_is_refused(
    fields: dict[str, Any], status: int, param: str | None
) -> None:
    async with passed() as (running, fake):
        answer = await running.chat(**fields)
    assert (answer.status, answer.body["error"]["param"]) == (status, param)
    assert fake.requests == []


async def test_a_wildcard_entry_uses_the_model_name_of_the_client() -> None:
    async with FakeOpenAi(models=("qwen:7b",)) as fake, served(entry(fake.url, "ollama/*", name="local/*")) as running:
        answer = await running.chat(model="local/qwen:7b")
    assert answer.body["model"] == "local/qwen:7b"
    assert fake.requests[0].json["model"] == "qwen:7b"


NAMES = {
    "configured name": ("openai/gpt-4o", "alias", "anything", "openai/gpt-4o"),
    "wildcard": ("openai/*", "*", "gpt-4o", "openai/gpt-4o"),
    "wildcard, with the provider": ("openai/*", "*", "openai/gpt-4o", "openai/gpt-4o"),
    "wildcard of one provider": ("openai/*", "openai/*", "openai/gpt-4o", "openai/gpt-4o"),
    "wildcard with a prefix": ("ollama/*", "local/*", "local/qwen:7b", "ollama/qwen:7b"),
    "provider wildcard": ("*", "*", "anthropic/claude", "anthropic/claude"),
    "wildcard with a suffix": ("azure/eu-*-1", "gpt-*", "gpt-4o", "azure/eu-4o-1"),
}


@pytest.mark.parametrize(("pattern", "group", "asked", "name"), NAMES.values(), ids=NAMES)
def test_wildcards_map_the_requested_name_to_the_backend_name(pattern: str, group: str, asked: str, name: str) -> None:
    assert named(pattern, starred(group, asked)) == name


# -- several deployments

SERVER_ERROR = Refusal(500, b"{}")


@asynccontextmanager
async def two(
    first: OpenAiScript | Refusal, second: OpenAiScript | Refusal, **sections: Any
) -> AsyncIterator[tuple[Gateway, FakeOpenAi, FakeOpenAi]]:
    """Run a gateway with two deployments that are tried in order."""
    async with (
        FakeOpenAi(first) as one,
        FakeOpenAi(second) as other,
        served(entry(one.url), entry(other.url, order=1), **sections) as running,
    ):
        yield running, one, other


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_failure_before_the_first_event_fails_over(stream: bool) -> None:
    async with two(SERVER_ERROR, ANSWER) as (running, broken, well):
        answer = await running.chat(model="other", stream=stream)
    assert answer.status == 200
    assert (len(broken.requests), len(well.requests)) == (1, 1)
    assert (answer.headers["x-unisono-backend"], answer.headers["x-unisono-failovers"]) == ("vllm-2", "1")


async def test_an_invalid_request_does_not_fail_over() -> None:
    async with two(Refusal(400, b"{}"), Refusal(400, b"{}")) as (running, first, second):
        answer = await running.chat(model="other")
    assert answer.status == 400
    assert len(first.requests) + len(second.requests) == 1


async def test_a_deployment_that_fails_too_often_cools_down() -> None:
    async with two(SERVER_ERROR, ANSWER, router_settings={"allowed_fails": 0}) as (running, broken, _):
        for _ in range(3):
            assert (await running.chat(model="other")).status == 200
    assert len(broken.requests) == 1


async def test_requests_respect_max_parallel_requests() -> None:
    script = OpenAiScript(delay_s=0.1)
    async with FakeOpenAi(script) as fake, served(entry(fake.url, max_parallel_requests=1)) as running:
        answers = await asyncio.gather(*(running.chat(model="other") for _ in range(3)))
    assert [answer.status for answer in answers] == [200] * 3
    begun = sorted(seen.at for seen in fake.requests)
    done = sorted(seen.done_at or 0.0 for seen in fake.requests)
    assert all(later >= earlier for earlier, later in zip(done, begun[1:], strict=False))


# -- together with gpt-oss


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_gpt_oss_is_preferred_in_a_mixed_group(stream: bool) -> None:
    async with FakeVllm(tokens=HARMONY) as oss, FakeOpenAi() as other:
        both = (entry(other.url, name="m"), oss_entry(oss.url, "m"))
        async with served(*both) as running:
            answer = await running.chat(model="m", stream=stream)
    assert answer.headers["x-unisono-backend"] == "vllm-2"
    assert "Harmony." in answer.raw.decode()
    assert other.requests == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("by", ["group", "fallbacks"])
async def test_a_gpt_oss_failure_forwards_the_original_body(stream: bool, by: str) -> None:
    async with FakeVllm(script=lambda _: SERVER_ERROR) as oss, FakeOpenAi() as other:
        name = "m" if by == "group" else "elsewhere"
        sections = {} if by == "group" else {"router_settings": {"fallbacks": [{"m": ["elsewhere"]}]}}
        both = (oss_entry(oss.url, "m"), entry(other.url, name=name))
        async with served(*both, **sections) as running:
            answer = await running.chat(model="m", stream=stream, temperature=0.5)
    assert answer.status == 200
    [request] = other.requests
    assert request.json["model"] == "qwen"
    assert request.json["temperature"] == 0.5
    body = answer.events[0] if stream else answer.body
    assert (body["id"], body["model"]) == ("chatcmpl-there", "m")
    assert answer.headers["x-unisono-failovers"] == "1"


@pytest.mark.parametrize("n", [2, "2"])
async def test_a_stream_ends_after_the_usage_of_its_last_choice(n: int | str) -> None:
    def usage_of_each_choice(steps: list[Step]) -> list[Step]:
        """End a choice with its usage before the other choice begins, as llama.cpp does."""
        ended = {"choices": [{"index": 1, "delta": {}, "finish_reason": "stop"}]}
        usage = {"choices": [], "usage": OpenAiScript().usage}
        begun = [Write(sse_event(event), framed=True) for event in (ended, usage)]
        return [*steps[:1], *begun, Sleep(3 * LINGER_S), *steps[1:]]

    async with passed(OpenAiScript(faults=(usage_of_each_choice,))) as (running, _fake):
        answer = await running.chat(model="other", stream=True, n=n)
    assert (text_of(answer), answer.done) == ("Four.", True)


@pytest.mark.parametrize("by", ["group", "fallbacks"])
async def test_a_partial_gpt_oss_answer_continues_on_the_backend_that_failed(by: str) -> None:
    tokens, begun = load_encoding().encode_marked("<|channel|>final<|message|>One two three four.<|return|>"), 5
    outputs = [VllmScript(tokens=tokens, per_chunk=1, faults=(reset_at(begun),)), VllmScript(tokens=tokens[begun:])]

    def script(_: Any) -> VllmScript:
        return outputs.pop(0)

    async with FakeVllm(script=script) as oss, FakeOpenAi() as other:
        name = "m" if by == "group" else "elsewhere"
        sections = {} if by == "group" else {"router_settings": {"fallbacks": [{"m": ["elsewhere"]}]}}
        async with served(oss_entry(oss.url, "m"), entry(other.url, name=name), **sections) as running:
            answer = await running.chat(model="m", stream=True)
    assert outputs == []
    assert (text_of(answer), answer.done) == ("One two three four.", True), answer.raw
    assert other.requests == []


async def test_several_choices_use_only_the_kind_of_the_requested_model() -> None:
    async with FakeVllm(script=lambda _: SERVER_ERROR) as oss, FakeOpenAi() as other:
        settings = {"fallbacks": [{"oss": ["other"]}]}
        async with served(oss_entry(oss.url, "oss"), entry(other.url), router_settings=settings) as running:
            assert (await running.chat(model="oss", n=2)).status == 502
            assert (await running.chat(model="oss", n=1)).status == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_gpt_oss_is_a_fallback_for_a_pass_through_model(stream: bool) -> None:
    async with FakeVllm(tokens=HARMONY) as oss, FakeOpenAi(SERVER_ERROR) as other:
        both = (oss_entry(oss.url, "oss"), entry(other.url, name="m"))
        async with served(*both, router_settings={"fallbacks": [{"m": ["oss"]}]}) as running:
            answer = await running.chat(model="m", stream=stream)
            odd_answer = await running.chat(model="m", stream=stream, **ODD)
            n_answer = await running.chat(model="m", stream=stream, n=2)
    assert answer.status == 200
    assert "Harmony." in answer.raw.decode()
    assert (answer.headers["x-unisono-backend"], answer.headers["x-unisono-failovers"]) == ("vllm-1", "1")
    # gpt-oss supports neither of these requests.
    assert (odd_answer.status, n_answer.status) == (502, 502)
    assert len(other.requests) == 7


class Silent(Refusal):
    """Response without headers or body."""

    def steps(self) -> list[Step]:
        return [Stall()]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_both_kinds_of_deployment_share_the_request_timeout(stream: bool) -> None:
    limits = {"timeout": 3, "num_retries": 1}
    async with (
        FakeVllm(tokens=HARMONY) as oss,
        FakeOpenAi() as other,
        served(oss_entry(oss.url, "m"), entry(other.url, name="m"), router_settings=limits) as running,
    ):
        oss.script = lambda _: Silent(200)
        began = time.monotonic()
        answer = await running.chat(model="m", stream=stream)
        took_s = time.monotonic() - began
        assert answer.status == 200
        assert answer.headers["x-unisono-backend"] == "vllm-2"
        assert took_s < limits["timeout"]
        other.script = Silent(200)
        began = time.monotonic()
        answer = await running.chat(model="m", stream=stream)
        assert answer.body["error"]["code"] == "backend_timeout"
        assert time.monotonic() - began < limits["timeout"] + 1.5


SURFACES = {
    "responses/input_tokens": {"input": "Hi"},
    "messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]},
    "messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "completions": {"prompt": "a"},
}


@pytest.mark.parametrize("path", SURFACES)
async def test_other_endpoints_refuse_a_pass_through_model(path: str) -> None:
    raw = {"raw_completions": True}
    async with FakeOpenAi(ANSWER) as fake, served(entry(fake.url, name="local/*"), unisono=raw) as running:
        answer = await running.post(f"/v1/{path}", json.dumps({"model": "local/q", **SURFACES[path]}).encode())
    assert answer.status == 400
    assert "The pass-through model `local/q` supports only" in answer.body["error"]["message"]
    assert fake.requests == []
