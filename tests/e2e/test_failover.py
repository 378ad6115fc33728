"""Another deployment answers as long as the client has seen nothing."""

from __future__ import annotations

import pytest

from tests.e2e.gateway import config_of, gateway, message_of
from tests.fakes import FakeVllm, reset_at
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
ANSWER = ENCODING.encode_marked(
    "<|channel|>analysis<|message|>Think first.<|end|><|channel|>final<|message|>Then answer in full.<|return|>"
)
HELD = ENCODING.encode_marked(
    "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
)


async def test_a_whole_answer_may_break_off_anywhere() -> None:
    for position in (1, 5, len(ANSWER) - 2):
        async with (
            FakeVllm(tokens=ANSWER, faults=(reset_at(position),)) as broken,
            FakeVllm(tokens=ANSWER) as well,
            gateway(config_of(f"vllm@{broken.url}", f"vllm@{well.url}")) as running,
        ):
            failovers = 0
            for _ in range(2):
                said = message_of(await running.chat())
                assert (said.reasoning, said.content) == ("Think first.", "Then answer in full.")
                assert said.note["recoveries"] == ["missing-start"]
                assert said.usage["completion_tokens"] == len(ANSWER)
                failovers += said.note["failovers"]
            assert failovers == 1


async def test_a_stream_may_break_off_while_all_of_it_is_held() -> None:
    async with (
        FakeVllm(tokens=HELD, faults=(reset_at(len(HELD) - 2),)) as broken,
        FakeVllm(tokens=ANSWER) as well,
        gateway(config_of(f"vllm@{broken.url}", f"vllm@{well.url}")) as running,
    ):
        answers = [await running.chat(stream=True) for _ in range(2)]
        assert [message_of(answer).content for answer in answers] == ["Then answer in full."] * 2
        assert sorted(message_of(answer).note["failovers"] for answer in answers) == [0, 1]
        assert all(message_of(answer).note["recoveries"] == ["missing-start"] for answer in answers)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_prompt_too_long_for_one_deployment_goes_to_a_larger_one(stream: bool) -> None:
    long = [{"role": "user", "content": "word " * 300}]
    async with (
        FakeVllm(tokens=ANSWER, context=200) as small,
        FakeVllm(tokens=ANSWER, context=4096) as large,
        gateway(config_of(f"vllm@{small.url}", f"vllm@{large.url}")) as running,
    ):
        for _ in range(2):
            answer = await running.chat(messages=long, stream=stream)
            assert message_of(answer).content == "Then answer in full."
        assert not [request for request in small.requests if request.method == "POST" and request.json.get("stream")]


async def test_a_prompt_too_long_for_all_is_said_so() -> None:
    long = [{"role": "user", "content": "word " * 300}]
    async with (
        FakeVllm(tokens=ANSWER, context=200) as one,
        FakeVllm(tokens=ANSWER, context=200) as other,
        gateway(config_of(f"vllm@{one.url}", f"vllm@{other.url}")) as running,
    ):
        answer = await running.chat(messages=long)
        assert (answer.status, answer.body["error"]["code"]) == (400, "context_length_exceeded")
