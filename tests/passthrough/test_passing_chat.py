"""Chat Completions of models that are not Harmony: to the server's own API and back, as they are."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway, gateway
from tests.fakes import FakeVllm, Refusal, close_at, reset_at
from tests.fakes.faults import Fault, inject_at, without_done
from tests.fakes.openai_api import FakeOpenAi, OpenAiScript
from tests.fakes.wire import Stall, Step
from unisono.core.passthrough_request import named, starred
from unisono.harmony.encoding import load_encoding

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
        await running.app.state.gateway.pool.settled(5)
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
async def test_a_body_arrives_as_it_came_but_for_the_models_name(kind: str, stream: bool) -> None:
    async with FakeOpenAi() as fake, served(entry(fake.url + "/v1", f"{kind}/qwen:7b")) as running:
        answer = await running.chat(model="other", stream=stream, **ODD)
    name = "default_model" if kind == "mlx_server" else "qwen:7b"
    [asked] = fake.requests
    sent = asked.json
    assert answer.status == 200, answer.raw
    assert asked.path == "/v1/chat/completions"
    if stream:
        assert sent.pop("stream_options") == {"include_usage": True}
    assert sent == {**ODD, "model": name, "stream": stream}
    assert "authorization" not in asked.headers


async def test_a_whole_answer_comes_back_as_it_is_under_the_name_asked_for() -> None:
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


async def test_a_stream_comes_back_event_by_event_under_the_name_asked_for() -> None:
    async with passed() as (running, _fake):
        answer = await running.chat(model="other", stream=True)
    assert text_of(answer) == "Four."
    assert {event["model"] for event in answer.events} == {"other"}
    assert {event["id"] for event in answer.events} == {"chatcmpl-there"}
    assert answer.done
    assert len(answer.events) == 4


USAGES: dict[str, tuple[dict[str, Any], bool]] = {
    "not asked for": ({}, False),
    "asked for": ({"stream_options": {"include_usage": True}}, True),
    "not wanted": ({"stream_options": {"include_usage": False, "other": 1}}, False),
}


@pytest.mark.parametrize(("fields", "shown"), USAGES.values(), ids=USAGES)
async def test_usage_is_always_asked_for_and_only_shown_to_who_asked(fields: dict[str, Any], shown: bool) -> None:
    async with passed() as (running, fake):
        answer = await running.chat(model="other", stream=True, **fields)
    assert fake.requests[0].json["stream_options"] == {**fields.get("stream_options", {}), "include_usage": True}
    assert any("usage" in event for event in answer.events) is shown
    assert all(event["choices"] for event in answer.events) is not shown


async def test_events_are_handed_on_while_the_rest_is_still_being_made() -> None:
    async with passed(OpenAiScript(words=("a", "b"), delay_s=0.4)) as (running, fake):
        body = {"model": "other", "stream": True, "messages": []}
        async with running.session.post(running.url + "/v1/chat/completions", json=body) as response:
            first = await response.content.readuntil(b"\n\n")
            assert json.loads(first.removeprefix(b"data: "))["id"] == "chatcmpl-there"
            assert fake.requests[0].done_at is None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_ends_the_request_there(stream: bool) -> None:
    async with passed(OpenAiScript(words=("a",) * 50, delay_s=0.2)) as (running, fake):
        body = {"model": "other", "stream": stream, "messages": []}
        asking = asyncio.ensure_future(running.post("/v1/chat/completions", json.dumps(body).encode()))
        await fake.asked()
        asking.cancel()
        await fake.gone()


# -- refused and failing

REFUSED: dict[str, tuple[Refusal, int, str, str]] = {
    "a wrong request": (
        Refusal(400, b'{"error": {"message": "temperature is odd", "type": "x"}}'),
        400,
        "backend_rejected_request",
        "temperature is odd",
    ),
    "too long": (
        Refusal(400, b'{"error": {"message": "maximum context length is 10 tokens"}}'),
        400,
        "context_length_exceeded",
        "maximum context length",
    ),
    "the gateway's key": (Refusal(401, b'{"error": "bad key sk-secret"}'), 503, "backend_unavailable", ""),
    "busy": (Refusal(429, b"{}", headers={"Retry-After": "7"}), 503, "backend_overloaded", ""),
    "broken": (Refusal(500, b"trace at /home/somebody"), 502, "backend_error", ""),
    "no JSON": (Refusal(200, b"<html>"), 502, "backend_protocol_error", ""),
    "an error under 200": (
        Refusal(200, b'{"error": {"message": "no", "code": 400}}'),
        400,
        "backend_rejected_request",
        "",
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("refusal", "status", "code", "says"), REFUSED.values(), ids=REFUSED)
async def test_failures_of_the_server_are_told_as_those_of_any_backend(
    refusal: Refusal, status: int, code: str, says: str, stream: bool
) -> None:
    async with passed(refusal, router_settings={"num_retries": 0}) as (running, _fake):
        answer = await running.chat(model="other", stream=stream)
    error = answer.body["error"]
    assert (answer.status, error["code"]) == (status, code)
    assert says in error["message"]
    assert "sk-secret" not in answer.raw.decode()
    assert "/home" not in answer.raw.decode()


BREAKS: dict[str, tuple[Fault, str]] = {
    "reset": (reset_at(2), "backend_protocol_error"),
    "cut": (close_at(2), "backend_protocol_error"),
    "garbage": (inject_at(2, b"data: garbage\n\n"), "backend_protocol_error"),
    "an error event": (inject_at(2, b'data: {"error": {"message": "lost"}}\n\n'), "backend_protocol_error"),
}


@pytest.mark.parametrize(("fault", "code"), BREAKS.values(), ids=BREAKS)
async def test_a_stream_that_breaks_off_ends_in_an_error_and_without_done(fault: Fault, code: str) -> None:
    async with passed(OpenAiScript(words=("a", "b", "c"), delay_s=0.02, faults=(fault,))) as (running, _fake):
        answer = await running.chat(model="other", stream=True)
    assert answer.status == 200
    assert answer.events[-1]["error"]["code"] == code
    assert not answer.done


async def test_a_stream_without_its_last_line_has_ended_where_its_end_was_told() -> None:
    async with passed(OpenAiScript(faults=(without_done,))) as (running, _fake):
        answer = await running.chat(model="other", stream=True)
    assert (text_of(answer), answer.done) == ("Four.", True)


WRONG: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "no such model": ({"model": "nobody"}, 404, "model"),
    "a stream that is none": ({"model": "other", "stream": "yes"}, 400, "stream"),
}


@pytest.mark.parametrize(("fields", "status", "param"), WRONG.values(), ids=WRONG)
async def test_only_what_keeps_it_from_being_sent_is_refused(
    fields: dict[str, Any], status: int, param: str | None
) -> None:
    async with passed() as (running, fake):
        answer = await running.chat(**fields)
    assert (answer.status, answer.body["error"]["param"]) == (status, param)
    assert fake.requests == []


async def test_an_entry_for_many_models_takes_the_clients_name() -> None:
    async with FakeOpenAi(models=("qwen:7b",)) as fake, served(entry(fake.url, "ollama/*", name="local/*")) as running:
        answer = await running.chat(model="local/qwen:7b")
    assert answer.body["model"] == "local/qwen:7b"
    assert fake.requests[0].json["model"] == "qwen:7b"


NAMES = {
    "the one that is configured": ("openai/gpt-4o", "alias", "anything", "openai/gpt-4o"),
    "for all": ("openai/*", "*", "gpt-4o", "openai/gpt-4o"),
    "for all, with the provider": ("openai/*", "*", "openai/gpt-4o", "openai/gpt-4o"),
    "of one provider": ("openai/*", "openai/*", "openai/gpt-4o", "openai/gpt-4o"),
    "by a prefix of its own": ("ollama/*", "local/*", "local/qwen:7b", "ollama/qwen:7b"),
    "whatever it is": ("*", "*", "anthropic/claude", "anthropic/claude"),
    "with something behind it": ("azure/eu-*-1", "gpt-*", "gpt-4o", "azure/eu-4o-1"),
}


@pytest.mark.parametrize(("pattern", "group", "asked", "name"), NAMES.values(), ids=NAMES)
def test_which_name_a_model_goes_by(pattern: str, group: str, asked: str, name: str) -> None:
    assert named(pattern, starred(group, asked)) == name


# -- several deployments

HOPELESS = Refusal(500, b"{}")


@asynccontextmanager
async def two(
    first: OpenAiScript | Refusal, second: OpenAiScript | Refusal, **sections: Any
) -> AsyncIterator[tuple[Gateway, FakeOpenAi, FakeOpenAi]]:
    """One deployment behind the other."""
    async with (
        FakeOpenAi(first) as one,
        FakeOpenAi(second) as other,
        served(entry(one.url), entry(other.url, order=1), **sections) as running,
    ):
        yield running, one, other


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_what_fails_before_anything_was_shown_is_tried_elsewhere(stream: bool) -> None:
    async with two(HOPELESS, ANSWER) as (running, broken, well):
        answer = await running.chat(model="other", stream=stream)
    assert answer.status == 200
    assert (len(broken.requests), len(well.requests)) == (1, 1)
    assert (answer.headers["x-unisono-backend"], answer.headers["x-unisono-failovers"]) == ("vllm-2", "1")


async def test_a_wrong_request_is_not_tried_elsewhere() -> None:
    async with two(Refusal(400, b"{}"), Refusal(400, b"{}")) as (running, first, second):
        answer = await running.chat(model="other")
    assert answer.status == 400
    assert len(first.requests) + len(second.requests) == 1


async def test_one_that_fails_too_often_rests() -> None:
    async with two(HOPELESS, ANSWER, router_settings={"allowed_fails": 0}) as (running, broken, _):
        for _ in range(3):
            assert (await running.chat(model="other")).status == 200
    assert len(broken.requests) == 1


async def test_no_more_requests_run_than_a_deployment_may_have() -> None:
    script = OpenAiScript(delay_s=0.1)
    async with FakeOpenAi(script) as fake, served(entry(fake.url, max_parallel_requests=1)) as running:
        answers = await asyncio.gather(*(running.chat(model="other") for _ in range(3)))
    assert [answer.status for answer in answers] == [200] * 3
    begun = sorted(seen.at for seen in fake.requests)
    done = sorted(seen.done_at or 0.0 for seen in fake.requests)
    assert all(later >= earlier for earlier, later in zip(done, begun[1:], strict=False))


# -- beside gpt-oss


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_gpt_oss_is_asked_first_where_a_model_has_both(stream: bool) -> None:
    async with FakeVllm(tokens=HARMONY) as oss, FakeOpenAi() as other:
        both = (entry(other.url, name="m"), oss_entry(oss.url, "m"))
        async with served(*both) as running:
            answer = await running.chat(model="m", stream=stream)
    assert answer.headers["x-unisono-backend"] == "vllm-2"
    assert "Harmony." in answer.raw.decode()
    assert other.requests == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("by", ["group", "fallbacks"])
async def test_what_gpt_oss_fails_with_sends_the_original_body_on(stream: bool, by: str) -> None:
    async with FakeVllm(script=lambda _: HOPELESS) as oss, FakeOpenAi() as other:
        name = "m" if by == "group" else "elsewhere"
        sections = {} if by == "group" else {"router_settings": {"fallbacks": [{"m": ["elsewhere"]}]}}
        both = (oss_entry(oss.url, "m"), entry(other.url, name=name))
        async with served(*both, **sections) as running:
            answer = await running.chat(model="m", stream=stream, temperature=0.5)
    assert answer.status == 200
    [asked] = other.requests
    assert asked.json["model"] == "qwen"
    assert asked.json["temperature"] == 0.5
    shown = answer.events[0] if stream else answer.body
    assert (shown["id"], shown["model"]) == ("chatcmpl-there", "m")
    assert answer.headers["x-unisono-failovers"] == "1"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_gpt_oss_stands_in_for_a_model_that_passes(stream: bool) -> None:
    async with FakeVllm(tokens=HARMONY) as oss, FakeOpenAi(HOPELESS) as other:
        both = (oss_entry(oss.url, "oss"), entry(other.url, name="m"))
        async with served(*both, router_settings={"fallbacks": [{"m": ["oss"]}]}) as running:
            answer = await running.chat(model="m", stream=stream)
            odd = await running.chat(model="m", stream=stream, **ODD)
            several = await running.chat(model="m", stream=stream, n=2)
    assert answer.status == 200
    assert "Harmony." in answer.raw.decode()
    assert (answer.headers["x-unisono-backend"], answer.headers["x-unisono-failovers"]) == ("vllm-1", "1")
    # No gpt-oss could answer these.
    assert (odd.status, several.status) == (502, 502)
    assert len(other.requests) == 7


class Silent(Refusal):
    """Not even headers."""

    def steps(self) -> list[Step]:
        return [Stall()]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_both_kinds_share_the_time_for_an_answer(stream: bool) -> None:
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
}


@pytest.mark.parametrize("path", SURFACES)
async def test_other_surfaces_say_that_a_model_only_passes(path: str) -> None:
    async with passed() as (running, fake):
        answer = await running.post(f"/v1/{path}", json.dumps({"model": "other", **SURFACES[path]}).encode())
    assert (answer.status, "pass-through model" in answer.body["error"]["message"]) == (400, True)
    assert fake.requests == []
