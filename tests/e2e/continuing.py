"""A fake model that continues its answer after the part that the prompt already contains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.e2e.wires import ENCODING
from tests.fakes import FakeVllm, Stall, Step, VllmScript
from unisono.core.generation import START

ASSISTANT = ENCODING.encode_marked("<|start|>assistant")


@dataclass
class Model:
    """Model with a fixed answer of `thoughts` reasoning words and `words` text words.

    `waits` keeps it silent before its first token.
    """

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
        """Return how many tokens of the answer the prompt ends with."""
        for start in [start for start, token in enumerate(prompt) if token == START]:
            if prompt[start : start + 2] != ASSISTANT:
                continue
            generated = prompt[start + 2 :]
            if generated == self.answer[: len(generated)]:
                return len(generated)
        raise AssertionError(f"the answer does not continue this prompt: {ENCODING.decode(prompt)[-300:]}")

    def script(self, body: dict[str, Any]) -> VllmScript:
        if self.waits:
            return Silent()
        left = self.answer[self.said(body["prompt"]) :]
        return VllmScript(tokens=left, per_chunk=self.per_chunk, delay_s=self.delay_s)


class Silent(VllmScript):
    def steps(self, asked: dict[str, Any]) -> list[Step]:
        return [Stall()]


def prompts_about(fake: FakeVllm, question: str) -> list[list[int]]:
    """Return the prompts with `question` that the fake received, in order."""
    prompts = [seen.json["prompt"] for seen in fake.requests if seen.path == "/v1/completions"]
    return [prompt for prompt in prompts if question in ENCODING.decode(prompt)]
