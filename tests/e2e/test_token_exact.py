"""Continued conversations: each prompt extends the tokens of the last prompt and output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.e2e.gateway import config_of, gateway, message_of
from tests.fakes import FakeVllm, VllmScript
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]
# Not the canonical form: recipient after the channel, and ids that no tokenizer would choose for this text.
SPLIT = [ENCODING.encode_text(c)[0] for c in '{"location":"Paris"}']
THOUGHT = ENCODING.encode_marked("<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant")
CALL = [
    *ENCODING.encode_marked("<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"),
    *SPLIT,
    *ENCODING.encode_marked("<|call|>"),
]
THOUGHT_AGAIN = "<|channel|>analysis<|message|>Good.<|end|><|start|>assistant"
FINAL = ENCODING.encode_marked(THOUGHT_AGAIN + "<|channel|>final<|message|>")
ANSWER = [*FINAL, *(ENCODING.encode_text(c)[0] for c in "Sunny."), *ENCODING.encode_marked("<|return|>")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("keeps_reasoning", [False, True], ids=["client drops reasoning", "client keeps reasoning"])
async def test_a_tool_turn_continues_after_its_exact_tokens(stream: bool, keeps_reasoning: bool) -> None:
    async with FakeVllm(tokens=THOUGHT + CALL) as fake, gateway(config_of(f"vllm@{fake.url}")) as running:
        question = {"role": "user", "content": "Weather in Paris?"}
        first = await running.chat(messages=[question], tools=TOOLS, stream=stream)
        call_id = call_id_of(first.events or [first.body])
        message = message_of(first)
        assert message.calls == [("get_weather", '{"location":"Paris"}')]
        turn: dict[str, Any] = {
            "role": "assistant",
            "content": None,
            "tool_calls": [call_of(call_id, *message.calls[0])],
        }
        if keeps_reasoning:
            turn["reasoning"] = message.reasoning
        result = {"role": "tool", "tool_call_id": call_id, "content": "18 degrees"}
        fake.script = lambda request: VllmScript(tokens=ANSWER)
        second = await running.chat(messages=[question, turn, result], tools=TOOLS, stream=stream)
        assert message_of(second).content == "Sunny."
        prompts = [request.json["prompt"] for request in fake.requests if request.method == "POST"]
        assert prompts[1][: len(prompts[0]) + len(THOUGHT + CALL)] == prompts[0] + THOUGHT + CALL

        thanks = {"role": "user", "content": "Thanks"}
        reply = {"role": "assistant", "content": "Sunny."}
        await running.chat(messages=[question, turn, result, reply, thanks], tools=TOOLS, stream=stream)
        third = [request.json["prompt"] for request in fake.requests if request.method == "POST"][2]
        # The turn is over, so its reasoning is dropped; the answer keeps its generated tokens.
        final = [*ANSWER[len(FINAL) - 3 : -1], *ENCODING.encode_marked("<|end|><|start|>user")]
        assert contains(third, final)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_several_messages_are_joined_and_sent_back_as_their_exact_tokens(stream: bool) -> None:
    def message_tokens(channel: str, text: str) -> list[int]:
        body = [ENCODING.encode_text(letter)[0] for letter in text]
        return [*ENCODING.encode_marked(f"<|channel|>{channel}<|message|>"), *body]

    tokens = [
        *message_tokens("commentary", "Adding first."),
        *ENCODING.encode_marked("<|end|><|start|>assistant"),
        *message_tokens("final", "Total: 18."),
    ]
    script = VllmScript(tokens=[*tokens, *ENCODING.encode_marked("<|return|>")])
    async with FakeVllm(script=lambda request: script) as fake, gateway(config_of(f"vllm@{fake.url}")) as running:
        question = {"role": "user", "content": "Add them."}
        first = await running.chat(messages=[question], tools=TOOLS, stream=stream, n=2, stop=["first.T", "\n\n"])
        contents = (
            [message_of(replace(first, events=of_choice(first.events, index))).content for index in range(2)]
            if stream
            else [choice["message"]["content"] for choice in first.body["choices"]]
        )
        assert contents == ["Adding first.\n\nTotal: 18."] * 2
        reply = {"role": "assistant", "content": contents[0]}
        await running.chat(messages=[question, reply, {"role": "user", "content": "Thanks"}], tools=TOOLS)
        prompts = [request.json["prompt"] for request in fake.requests if request.method == "POST"]
        assert contains(prompts[-1], [*tokens, *ENCODING.encode_marked("<|end|><|start|>user")])


def of_choice(events: list[Any], index: int) -> list[Any]:
    return [
        {**event, "choices": [{**choice, "index": 0}]}
        for event in events
        for choice in event["choices"]
        if choice["index"] == index
    ]


async def test_a_missing_answer_is_forced_after_the_exact_reasoning_tokens() -> None:
    reasoning = [
        *ENCODING.encode_marked("<|channel|>analysis<|message|>"),
        *SPLIT,
        *ENCODING.encode_marked("<|return|>"),
    ]
    outputs = [reasoning, ENCODING.encode_marked("Here it is.<|return|>")]
    async with (
        FakeVllm(script=lambda request: VllmScript(tokens=outputs.pop(0))) as fake,
        gateway(config_of(f"vllm@{fake.url}")) as running,
    ):
        message = message_of(await running.chat())
        assert (message.reasoning, message.content) == ('{"location":"Paris"}', "Here it is.")
        assert message.note["recoveries"] == ["analysis-only"]
        first, second = (request.json["prompt"] for request in fake.requests if request.method == "POST")
        forced_header = ENCODING.encode_marked("<|end|><|start|>assistant<|channel|>final<|message|>")
        assert second == first + reasoning[:-1] + forced_header
        assert message.usage["prompt_tokens"] == len(first)
        assert message.usage["completion_tokens"] == len(reasoning) + 5


async def test_a_prefilled_answer_is_continued_without_repetition() -> None:
    async with (
        FakeVllm(tokens=ENCODING.encode_marked(" a time.<|return|>")) as fake,
        gateway(config_of(f"vllm@{fake.url}")) as running,
    ):
        messages = [{"role": "user", "content": "A tale"}, {"role": "assistant", "content": "Once upon"}]
        assert message_of(await running.chat(messages=messages)).content == " a time."
        assert ENCODING.decode(fake.requests[-1].json["prompt"]).endswith("<|channel|>final<|message|>Once upon")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_stop_string_ends_the_answer_and_the_generation(stream: bool) -> None:
    text = "<|channel|>analysis<|message|>END is near.<|end|><|start|>assistant<|channel|>final<|message|>one END two"
    script = VllmScript(tokens=ENCODING.encode_marked(text + " three" * 200), delay_s=0.005)
    async with FakeVllm(script=lambda request: script) as fake, gateway(config_of(f"vllm@{fake.url}")) as running:
        response = await running.chat(stop=["END"], stream=stream)
        message = message_of(response)
        assert (message.reasoning, message.content, message.finish_reason) == ("END is near.", "one ", "stop")
        assert "stop" not in fake.requests[-1].json
        await fake.gone()


def call_id_of(bodies: list[Any]) -> str:
    for body in bodies:
        choice = body["choices"][0] if body["choices"] else {}
        for call in (choice.get("delta") or choice.get("message") or {}).get("tool_calls") or ():
            if call.get("id"):
                return str(call["id"])
    raise AssertionError("no call")


def call_of(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def contains(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[index : index + len(part)] == part for index in range(len(tokens)))
