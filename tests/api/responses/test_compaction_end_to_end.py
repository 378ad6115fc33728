"""A conversation made short, as a backend sees it: what is in the prompts before, during and after."""

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
POT = "The porcelain pot is empty."
THOUGHTS = "<|channel|>analysis<|message|>A summary, then.<|end|><|start|>assistant"
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Is there tea?"},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"into":"porcelain"}'},
    {"type": "function_call_output", "call_id": "c1", "output": POT},
    {"role": "assistant", "content": "There is none in the porcelain."},
]
MORE = {"role": "user", "content": "Then make some."}
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]


def saying(text: str) -> list[int]:
    return ENCODING.encode_marked(f"<|channel|>final<|message|>{text}<|return|>")


def prompts(fake: FakeVllm) -> list[list[int]]:
    return [request.json["prompt"] for request in fake.requests if request.path == "/v1/completions"]


async def post(running: Gateway, path: str, **fields: Any) -> Any:
    answer = await running.post(path, json.dumps({"model": "gpt-oss", **fields}).encode())
    assert answer.status == 200, answer.raw
    return answer.body


@pytest.mark.parametrize("over", ["/v1/responses", "/open-responses/v1/responses", "a socket"])
async def test_the_summary_stands_in_for_the_old_turns_on_any_replica(over: str) -> None:
    answers = [[*ENCODING.encode_marked(THOUGHTS), *saying(SUMMARY)], saying("Done.")]
    async with FakeVllm(script=lambda asked: VllmScript(tokens=answers.pop(0))) as fake:
        config = config_of(f"vllm@{fake.url}", unisono=SALT)
        async with gateway(config) as one, gateway(config) as other:
            compacted = await post(one, "/v1/responses/compact", input=TALK, tools=TOOLS)
            given = {"input": [*compacted["output"], MORE], "tools": TOOLS, "store": False}
            if over == "a socket":
                async with connect(other.url.replace("http", "ws", 1) + "/v1/responses") as socket:
                    await socket.send(json.dumps({"type": "response.create", "model": "gpt-oss", **given}))
                    while json.loads(await socket.recv())["type"] != "response.completed":
                        pass
            else:
                answer = await post(other, over, **given)
                assert answer["output"][0]["content"][0]["text"] == "Done."
        during, after = (ENCODING.decode(prompt) for prompt in prompts(fake))
    assert POT in during
    assert "Sum up our conversation" in during
    for gone in (POT, "porcelain", "A summary, then.", "Sum up our conversation"):
        assert gone not in after
    for there in ("Is there tea?", SUMMARY, "Then make some."):
        assert after.count(there) == 1
    assert after.index("Is there tea?") < after.index(SUMMARY) < after.index("Then make some.")


async def test_without_the_key_a_compaction_says_nothing() -> None:
    answers = [saying(SUMMARY), saying("Done.")]
    async with (
        FakeVllm(script=lambda asked: VllmScript(tokens=answers.pop(0))) as fake,
        gateway(config_of(f"vllm@{fake.url}", unisono=SALT)) as one,
        gateway(config_of(f"vllm@{fake.url}")) as stranger,
    ):
        compacted = await post(one, "/v1/responses/compact", input=TALK)
        answer = await post(stranger, "/v1/responses", input=[*compacted["output"], MORE])
        assert SUMMARY not in ENCODING.decode(prompts(fake)[-1])
        [note] = answer["unisono"]["notes"]
        assert note.startswith("input.1:")


async def test_the_model_sums_up_behind_the_very_tokens_of_the_conversation() -> None:
    answers = [saying("None."), saying(SUMMARY)]
    same: dict[str, Any] = {"tools": TOOLS, "instructions": "Be brief.", "reasoning": {"effort": "high"}}
    async with (
        FakeVllm(script=lambda asked: VllmScript(tokens=answers.pop(0))) as fake,
        gateway(config_of(f"vllm@{fake.url}")) as running,
    ):
        one = await post(running, "/v1/responses", input="Is there tea?", **same)
        await post(running, "/v1/responses/compact", previous_response_id=one["id"], **same)
        before, during = prompts(fake)
    made = [*saying("None.")[:-1], *ENCODING.encode_marked("<|end|>")]
    assert during[: len(before) + len(made)] == before + made
