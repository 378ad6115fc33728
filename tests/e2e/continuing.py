"""A model that can be asked again: its answer is the same however often it is interrupted, and goes on behind whatever
part of it the prompt holds already."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.e2e.wires import ENCODING
from tests.fakes import FakeVllm, Stall, Step, VllmScript
from unisono.core.generation import START

ASSISTANT = ENCODING.encode_marked("<|start|>assistant")


@dataclass
class Model:
    """`thoughts` and `words` are how long it thinks and speaks. `waits` keeps it silent before its first token."""

    thoughts: int = 6
    words: int = 30
    per_chunk: int = 2
    delay_s: float = 0.012
    waits: bool = False
    answer: list[int] = field(init=False)

    def __post_init__(self) -> None:
        thought = " ".join(f"t{n}" for n in range(self.thoughts))
        thought = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        self.answer = ENCODING.encode_marked(f"{thought}<|channel|>final<|message|>{self.text}<|return|>")

    @property
    def text(self) -> str:
        return " ".join(f"w{n}" for n in range(self.words))

    def said(self, prompt: list[int]) -> int:
        """How many tokens of the answer a prompt ends in."""
        for place in [place for place, token in enumerate(prompt) if token == START]:
            if prompt[place : place + 2] != ASSISTANT:
                continue
            behind = prompt[place + 2 :]
            if behind == self.answer[: len(behind)]:
                return len(behind)
        raise AssertionError(f"a prompt that no answer goes on from: {ENCODING.decode(prompt)[-300:]}")

    def script(self, asked: dict[str, Any]) -> VllmScript:
        if self.waits:
            return Silent()
        left = self.answer[self.said(asked["prompt"]) :]
        return VllmScript(tokens=left, per_chunk=self.per_chunk, delay_s=self.delay_s)


class Silent(VllmScript):
    def steps(self, asked: dict[str, Any]) -> list[Step]:
        return [Stall()]


def prompts_about(fake: FakeVllm, question: str) -> list[list[int]]:
    """The prompts it got that hold `question`, in the order they came."""
    prompts = [seen.json["prompt"] for seen in fake.requests if seen.path == "/v1/completions"]
    return [prompt for prompt in prompts if question in ENCODING.decode(prompt)]
