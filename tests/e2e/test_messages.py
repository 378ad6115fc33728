"""Messages API on a whole gateway: reasoning in tool loops, token counts and API keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.e2e.gateway import Gateway, config_of, gateway
from tests.e2e.messages import message_in, text_in
from tests.fakes import FakeVllm, VllmScript
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
THOUGHT = "<|channel|>analysis<|message|>I look it up.<|end|><|start|>assistant"
CALLS = THOUGHT + '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{ "at" : "it", "n":1.0 }<|call|>'
ANSWER = "<|channel|>final<|message|>It is so.<|return|>"
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}
THINKING: dict[str, Any] = {
    "hidden": {},
    "visible": {"thinking": {"type": "adaptive"}},
    "omitted": {"thinking": {"type": "adaptive", "display": "omitted"}},
}
both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def script(request: dict[str, Any]) -> VllmScript:
    has_result = "to=assistant" in ENCODING.decode(request["prompt"])
    return VllmScript(tokens=ENCODING.encode_marked(ANSWER if has_result else CALLS))


@pytest.fixture
async def fake() -> AsyncIterator[FakeVllm]:
    async with FakeVllm(script=script) as running:
        yield running


@pytest.fixture
async def running_gateway(fake: FakeVllm) -> AsyncIterator[Gateway]:
    async with gateway(config_of(f"vllm@{fake.url}")) as running:
        yield running


def prompt_of(fake: FakeVllm) -> str:
    """Return the last prompt."""
    return ENCODING.decode(fake.requests[-1].json["prompt"])


@both_forms
@pytest.mark.parametrize("thinking", THINKING.values(), ids=THINKING)
async def test_a_tool_loop_continues_after_the_exact_tokens_of_its_call(
    running_gateway: Gateway, fake: FakeVllm, thinking: Any, stream: bool
) -> None:
    messages: list[Any] = [{"role": "user", "content": "How is it?"}]
    first = message_in(await running_gateway.messages(messages=messages, tools=[TOOL], stream=stream, **thinking))
    prompt = prompt_of(fake)
    assert first["content"][-1]["input"] == {"at": "it", "n": 1}
    result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "fine"}
    messages += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = message_in(await running_gateway.messages(messages=messages, tools=[TOOL], stream=stream, **thinking))
    assert prompt_of(fake).startswith(prompt + CALLS)
    assert (text_in(second["content"]), second["stop_reason"]) == ("It is so.", "end_turn")


@pytest.mark.parametrize("output", [CALLS, ANSWER, "Hi.", "<|return|>"], ids=["call", "answer", "text", "nothing"])
@pytest.mark.parametrize("last", [[], [{"role": "assistant", "content": "It"}]], ids=["question", "prefill"])
async def test_max_tokens_0_makes_the_backend_read_the_prompt_without_an_answer(output: str, last: list[Any]) -> None:
    messages = [{"role": "user", "content": "How is it?"}, *last]
    async with (
        FakeVllm(script=lambda _: VllmScript(tokens=ENCODING.encode_marked(output))) as fake,
        gateway(config_of(f"vllm@{fake.url}")) as running,
    ):
        before = len(fake.requests)
        message = message_in(await running.messages(messages=messages, tools=[TOOL], max_tokens=0))
        (request,) = fake.requests[before:]
    assert (message["content"], message["stop_reason"], message["stop_details"]) == ([], "max_tokens", None)
    assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (len(request.json["prompt"]), 1)
    assert request.json["max_tokens"] == 1


async def test_sealed_reasoning_is_read_by_another_process(running_gateway: Gateway, fake: FakeVllm) -> None:
    messages: list[Any] = [{"role": "user", "content": "How is it?"}]
    config = config_of(f"vllm@{fake.url}", unisono={"salt_key": "a salt of the tests, long enough"})
    for thinking in (THINKING["visible"], THINKING["omitted"]):
        async with gateway(config) as first_gateway, gateway(config) as second_gateway:
            first = message_in(await first_gateway.messages(messages=messages, tools=[TOOL], **thinking))
            result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "fine"}
            tool_turn = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
            message_in(await second_gateway.messages(messages=[*messages, *tool_turn], tools=[TOOL], **thinking))
            assert THOUGHT in prompt_of(fake)
        # A gateway with another key cannot read it. The session continues without the reasoning.
        other = await running_gateway.messages(messages=[*messages, *tool_turn], tools=[TOOL], **thinking)
        assert [note.partition(":")[0] for note in message_in(other)["unisono"]["notes"]] == ["messages.1.content.0"]
        assert THOUGHT not in prompt_of(fake)


async def test_counted_tokens_equal_the_prompt(running_gateway: Gateway, fake: FakeVllm) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "system": "Be brief."}
    counted = (await running_gateway.messages(path="/v1/messages/count_tokens", **fields)).body["input_tokens"]
    usage = message_in(await running_gateway.messages(**fields))["usage"]
    assert counted == usage["input_tokens"] == len(fake.requests[-1].json["prompt"])
    events = (await running_gateway.messages(**fields, stream=True)).events
    assert events[0]["message"]["usage"]["input_tokens"] == counted


async def test_an_api_key_reaches_no_backend(running_gateway: Gateway, fake: FakeVllm) -> None:
    body = b'{"model": "gpt-oss", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}'
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "sk-planted"}
    response = await running_gateway.post("/v1/messages?beta=true", body, **headers)
    assert response.status == 200
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert not [seen for seen in fake.requests if "sk-planted" in str(seen.headers)]
