"""Messages in front of a real gateway: what loops keep of thoughts, what is counted, and where keys go."""

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
    "shown": {"thinking": {"type": "adaptive"}},
    "omitted": {"thinking": {"type": "adaptive", "display": "omitted"}},
}
both_forms = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def script(asked: dict[str, Any]) -> VllmScript:
    answered = "to=assistant" in ENCODING.decode(asked["prompt"])
    return VllmScript(tokens=ENCODING.encode_marked(ANSWER if answered else CALLS))


@pytest.fixture
async def fake() -> AsyncIterator[FakeVllm]:
    async with FakeVllm(script=script) as running:
        yield running


@pytest.fixture
async def here(fake: FakeVllm) -> AsyncIterator[Gateway]:
    async with gateway(config_of(f"vllm@{fake.url}")) as running:
        yield running


def prompt_of(fake: FakeVllm) -> str:
    """The last one."""
    return ENCODING.decode(fake.requests[-1].json["prompt"])


@both_forms
@pytest.mark.parametrize("thinking", THINKING.values(), ids=THINKING)
async def test_a_loop_goes_on_behind_the_very_tokens_of_its_call(
    here: Gateway, fake: FakeVllm, thinking: Any, stream: bool
) -> None:
    talk: list[Any] = [{"role": "user", "content": "How is it?"}]
    first = message_in(await here.messages(messages=talk, tools=[TOOL], stream=stream, **thinking))
    begun = prompt_of(fake)
    assert first["content"][-1]["input"] == {"at": "it", "n": 1}
    result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "fine"}
    talk += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = message_in(await here.messages(messages=talk, tools=[TOOL], stream=stream, **thinking))
    assert prompt_of(fake).startswith(begun + CALLS)
    assert (text_in(second["content"]), second["stop_reason"]) == ("It is so.", "end_turn")


async def test_thoughts_come_back_to_another_process(here: Gateway, fake: FakeVllm) -> None:
    talk: list[Any] = [{"role": "user", "content": "How is it?"}]
    config = config_of(f"vllm@{fake.url}", unisono={"salt_key": "a salt of the tests, long enough"})
    for thinking in (THINKING["shown"], THINKING["omitted"]):
        async with gateway(config) as one, gateway(config) as other:
            first = message_in(await one.messages(messages=talk, tools=[TOOL], **thinking))
            result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "fine"}
            said = [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
            message_in(await other.messages(messages=[*talk, *said], tools=[TOOL], **thinking))
            assert THOUGHT in prompt_of(fake)
        refused = await here.messages(messages=[*talk, *said], tools=[TOOL], **thinking)
        assert (refused.status, refused.body["error"]["type"]) == (400, "invalid_request_error")
        assert "messages.1.content.0.signature" in refused.body["error"]["message"]


async def test_what_is_counted_is_the_prompt(here: Gateway, fake: FakeVllm) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "system": "Be brief."}
    counted = (await here.messages(path="/v1/messages/count_tokens", **fields)).body["input_tokens"]
    usage = message_in(await here.messages(**fields))["usage"]
    assert counted == usage["input_tokens"] == len(fake.requests[-1].json["prompt"])
    events = (await here.messages(**fields, stream=True)).events
    assert events[0]["message"]["usage"]["input_tokens"] == counted


async def test_a_key_reaches_no_backend(here: Gateway, fake: FakeVllm) -> None:
    body = b'{"model": "gpt-oss", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}'
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "sk-planted"}
    answer = await here.post("/v1/messages?beta=true", body, **headers)
    assert answer.status == 200
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert not [seen for seen in fake.requests if "sk-planted" in str(seen.headers)]
