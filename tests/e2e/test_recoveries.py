"""Recovery cases through the HTTP API, with token-id and text backends, streamed and not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.gateway import Answer, Gateway, Message, config_of, gateway, message_of
from tests.e2e.messages import compact, of_chat
from tests.e2e.messages import message_of as in_messages
from tests.fakes import FakeMlxServer, FakeVllm, MlxScript, VllmScript
from tests.harmony.recoveries import CASES, TOOLS, C, Case, F, P, R
from unisono.api.messages.tool_input import to_input, to_json
from unisono.core.conversation import join_messages
from unisono.core.generation import VOCABULARY
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
TOOL_FIELDS = [
    {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }
    for tool in TOOLS
]
BY_NUMBER = dict(enumerate(CASES.values()))
ON_TEXT = [number for number, case in BY_NUMBER.items() if case.on_text]
TERMINATORS = ("<|end|>", "<|return|>", "<|call|>", "<|endoftext|>")
# Text after a complete message: no message is open that a hidden stop token could end.
TEXT_AFTER_A_CALL = "and so on"


def case_number(prompt: str) -> int:
    """Return the number of the case that a prompt requests in its last user message."""
    return int(prompt.rpartition("case #")[2].partition("#")[0])


def vllm_script(request: dict[str, Any]) -> VllmScript:
    case = BY_NUMBER[case_number(ENCODING.decode(request["prompt"]))]
    return VllmScript(tokens=ENCODING.encode_as_server(case.output), finish=case.finish, per_chunk=3)


def mlx_script(request: dict[str, Any]) -> MlxScript:
    case = BY_NUMBER[case_number(request["prompt"])]
    return MlxScript(text=case.output, finish=case.finish, per_chunk=5)


def config_without_regeneration(deployment: str) -> dict[str, Any]:
    """Configuration without another generation: the scripts would repeat the output."""
    config = config_of(deployment)
    for entry in config["model_list"]:
        rules = ("regenerated-call", "dangling-preamble", "undeclared-tool")
        entry["unisono"] = {"recoveries": dict.fromkeys(rules, False)}
    return config


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ids() -> AsyncIterator[Gateway]:
    async with (
        FakeVllm(script=vllm_script) as fake,
        gateway(config_without_regeneration(f"vllm@{fake.url}")) as running,
    ):
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def text() -> AsyncIterator[Gateway]:
    async with (
        FakeMlxServer(script=mlx_script) as fake,
        gateway(config_without_regeneration(f"mlx_server@{fake.url}")) as running,
    ):
        yield running


async def request_case(running: Gateway, surface: str, number: int, *, stream: bool) -> Answer:
    fields = {"messages": [{"role": "user", "content": f"case #{number}#"}], "tools": TOOL_FIELDS, "stream": stream}
    if surface == "messages":
        return await running.messages(**of_chat(fields))
    return await running.chat(**fields, stream_options={"include_usage": True} if stream else None)


def assert_recovered(response: Answer, surface: str, case: Case, rules: tuple[str, ...], *, stream: bool) -> Message:
    assert response.status == 200
    message = in_messages(response) if surface == "messages" else message_of(response)
    assert response.done is (stream and surface == "chat")
    texts = [item.text for item in case.items if isinstance(item, P | F)]
    visible = "".join(texts) if surface == "messages" else join_messages(texts)
    thoughts = "".join(item.text for item in case.items if isinstance(item, R))
    calls = [(item.name, item.arguments) for item in case.items if isinstance(item, C)]
    if surface == "messages":
        # Messages arguments are an object even if the model wrote none; a stream has the model's own bytes.
        calls = [(name, to_json(text) if stream else compact(to_input(text))) for name, text in calls]
    assert (message.content or "") == visible
    assert (message.reasoning or "") == thoughts
    assert message.calls == calls
    assert message.finish_reason == (
        "tool_calls" if calls else "length" if case.cut or case.finish == "length" else "stop"
    )
    assert tuple(message.note["recoveries"]) == rules
    if not stream:
        assert response.headers.get("x-unisono-recoveries", "") == ",".join(rules)
    return message


@pytest.mark.sampled(one_in=10)
@pytest.mark.parametrize("surface", ["chat", "messages"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("number", BY_NUMBER, ids=CASES)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_token_id_backend_recovers_output(number: int, stream: bool, surface: str, ids: Gateway) -> None:
    case = BY_NUMBER[number]
    message = assert_recovered(
        await request_case(ids, surface, number, stream=stream), surface, case, case.rules, stream=stream
    )
    assert message.usage["completion_tokens"] == len(ENCODING.encode_as_server(case.output))


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("surface", ["chat", pytest.param("messages", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("number", ON_TEXT, ids=[list(CASES)[number] for number in ON_TEXT])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_text_backend_recovers_output(number: int, stream: bool, surface: str, text: Gateway) -> None:
    case = BY_NUMBER[number]
    # mlx_lm.server hides the token it stopped at, so a message without any end has a hidden stop token.
    has_hidden_stop = case.finish == "stop" and not case.output.endswith((*TERMINATORS, TEXT_AFTER_A_CALL))
    rules = ("restored-stop", *case.rules) if has_hidden_stop else case.rules
    assert_recovered(await request_case(text, surface, number, stream=stream), surface, case, rules, stream=stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_id_outside_the_vocabulary_is_dropped(stream: bool) -> None:
    start, rest = (ENCODING.encode_marked(text) for text in ("<|channel|>final<|message|>It ", "rains.<|return|>"))
    script = VllmScript(tokens=[*start, VOCABULARY, 2**33, *rest])
    config = config_of("vllm@", unisono={"raw_completions": True})
    async with FakeVllm(script=lambda _: script) as fake:
        config["model_list"][0]["litellm_params"]["api_base"] = fake.url
        async with gateway(config) as running:
            for fields in ({}, {"logprobs": True}):
                message = message_of(await running.chat(stream=stream, **fields))
                assert (message.content, message.note["recoveries"]) == ("It rains.", ["bad-token"])
            raw = await running.post("/v1/completions", b'{"model": "gpt-oss", "prompt": "Hi", "logprobs": 1}')
    assert raw.body["choices"][0]["text"] == "finalIt rains."
