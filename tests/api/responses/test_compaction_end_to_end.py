"""Compaction with a fake vLLM backend: prompts before, during and after the summary."""

from __future__ import annotations

import json
from typing import Any

import pytest
from websockets.asyncio.client import connect

from tests.e2e.gateway import Gateway, config_of, gateway
from tests.fakes import FakeVllm, VllmScript
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
SALT = {"salt_key": "a salt that two gateways share"}
SUMMARY = "They want tea; the pot is empty."
TOOL_OUTPUT = "The porcelain pot is empty."
REASONING = "<|channel|>analysis<|message|>A summary, then.<|end|><|start|>assistant"
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Is there tea?"},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"into":"porcelain"}'},
    {"type": "function_call_output", "call_id": "c1", "output": TOOL_OUTPUT},
    {"role": "assistant", "content": "There is none in the porcelain."},
]
FOLLOW_UP = {"role": "user", "content": "Then make some."}
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]


def answer_tokens(text: str) -> list[int]:
    return ENCODING.encode_marked(f"<|channel|>final<|message|>{text}<|return|>")


def prompts(fake: FakeVllm) -> list[list[int]]:
    return [request.json["prompt"] for request in fake.requests if request.path == "/v1/completions"]


async def post(running: Gateway, path: str, **fields: Any) -> Any:
    response = await running.post(path, json.dumps({"model": "gpt-oss", **fields}).encode())
    assert response.status == 200, response.raw
    return response.body


@pytest.mark.parametrize("transport", ["/v1/responses", "/open-responses/v1/responses", "websocket"])
async def test_the_summary_replaces_the_old_turns_on_any_replica(transport: str) -> None:
    answers = [[*ENCODING.encode_marked(REASONING), *answer_tokens(SUMMARY)], answer_tokens("Done.")]
    async with FakeVllm(script=lambda request: VllmScript(tokens=answers.pop(0))) as fake:
        config = config_of(f"vllm@{fake.url}", unisono=SALT)
        async with gateway(config) as first_replica, gateway(config) as second_replica:
            compacted = await post(first_replica, "/v1/responses/compact", input=CONVERSATION, tools=TOOLS)
            fields = {"input": [*compacted["output"], FOLLOW_UP], "tools": TOOLS, "store": False}
            if transport == "websocket":
                async with connect(second_replica.url.replace("http", "ws", 1) + "/v1/responses") as socket:
                    await socket.send(json.dumps({"type": "response.create", "model": "gpt-oss", **fields}))
                    while json.loads(await socket.recv())["type"] != "response.completed":
                        pass
            else:
                response = await post(second_replica, transport, **fields)
                assert response["output"][0]["content"][0]["text"] == "Done."
        summary_prompt, next_prompt = (ENCODING.decode(prompt) for prompt in prompts(fake))
    assert TOOL_OUTPUT in summary_prompt
    assert "Sum up our conversation" in summary_prompt
    for removed in (TOOL_OUTPUT, "porcelain", "A summary, then.", "Sum up our conversation"):
        assert removed not in next_prompt
    for expected in ("Is there tea?", SUMMARY, "Then make some."):
        assert next_prompt.count(expected) == 1
    assert next_prompt.index("Is there tea?") < next_prompt.index(SUMMARY) < next_prompt.index("Then make some.")


async def test_a_gateway_without_the_salt_key_skips_the_compaction() -> None:
    answers = [answer_tokens(SUMMARY), answer_tokens("Done.")]
    async with (
        FakeVllm(script=lambda request: VllmScript(tokens=answers.pop(0))) as fake,
        gateway(config_of(f"vllm@{fake.url}", unisono=SALT)) as gateway_with_key,
        gateway(config_of(f"vllm@{fake.url}")) as other_gateway,
    ):
        compacted = await post(gateway_with_key, "/v1/responses/compact", input=CONVERSATION)
        response = await post(other_gateway, "/v1/responses", input=[*compacted["output"], FOLLOW_UP])
        assert SUMMARY not in ENCODING.decode(prompts(fake)[-1])
        [note] = response["unisono"]["notes"]
        assert note.startswith("input.1:")


async def test_the_summary_prompt_extends_the_exact_conversation_tokens() -> None:
    answers = [answer_tokens("None."), answer_tokens(SUMMARY)]
    settings: dict[str, Any] = {"tools": TOOLS, "instructions": "Be brief.", "reasoning": {"effort": "high"}}
    async with (
        FakeVllm(script=lambda request: VllmScript(tokens=answers.pop(0))) as fake,
        gateway(config_of(f"vllm@{fake.url}")) as running,
    ):
        first = await post(running, "/v1/responses", input="Is there tea?", **settings)
        await post(running, "/v1/responses/compact", previous_response_id=first["id"], **settings)
        first_prompt, summary_prompt = prompts(fake)
    generated = [*answer_tokens("None.")[:-1], *ENCODING.encode_marked("<|end|>")]
    assert summary_prompt[: len(first_prompt) + len(generated)] == first_prompt + generated
