"""A fake model with one script, for backends of every kind.

It continues the script after the part that the prompt contains. Its server can fail while it answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tests.e2e.gateway import Gateway, gateway
from tests.e2e.obeying import KINDS, STOPS
from tests.fakes import LlamaCppScript, MlxScript, OllamaScript, Refusal, SglangScript, VllmScript
from tests.fakes.faults import Fault
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
START = "<|start|>assistant"
IDS = frozenset({"vllm", "sglang", "llamacpp"})
SCRIPTS: dict[str, Callable[..., Any]] = {
    "vllm": VllmScript,
    "sglang": SglangScript,
    "llamacpp": LlamaCppScript,
    "ollama": OllamaScript,
    "mlx_server": MlxScript,
}

# Builds a configuration from deployments, `kind@url`, and settings under `unisono`.
Config: TypeAlias = Callable[..., dict[str, Any]]


@dataclass
class Play:
    """A script and its failures.

    `script` is the whole output after the first `<|start|>assistant`. Each streaming request takes the next one of
    `failures`: a fault or a refusal. `prompts` are the requested prompts, as text.
    """

    script: str
    failures: list[Fault | Refusal] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    # Kinds of the backends that got a request, in order.
    asked: list[str] = field(default_factory=list)

    def serve(self, kind: str, fake: Any) -> None:
        fake.script = lambda body: self._answer(kind, body["prompt"], fails=body.get("stream") is not False)

    def _answer(self, kind: str, prompt: str | Sequence[int], *, fails: bool) -> Any:
        marked = prompt if isinstance(prompt, str) else ENCODING.decode(prompt)
        self.prompts.append(marked)
        self.asked.append(kind)
        failure = self.failures.pop(0) if fails and self.failures else None
        if isinstance(failure, Refusal):
            return failure
        more: dict[str, Any] = {} if failure is None else {"faults": (failure,)}
        if kind in IDS:
            return SCRIPTS[kind](
                tokens=self._ids_left(prompt) or ENCODING.encode_as_server(self.script[self._said(marked) :]), **more
            )
        # One kind omits from a prompt what its server cannot process, and generates it again.
        rest = self.script[self._said(marked) :] if START in marked else START + self.script
        stop = next((stop for stop in STOPS if rest.endswith(stop)), "")
        return SCRIPTS[kind](text=rest.removesuffix(stop), per_chunk=3, **more)

    def _ids_left(self, prompt: Sequence[int]) -> list[int]:
        """Return the remaining ids after a prompt that ends with some of them.

        Empty if the prompt does not end at the boundaries of the script's tokens.
        """
        whole, start = ENCODING.encode_marked(self.script), ENCODING.encode_marked(START)
        for count in range(len(whole) - 1, -1, -1):
            before = len(prompt) - count
            if list(prompt[before:]) == whole[:count] and list(prompt[before - len(start) : before]) == start:
                return whole[count:]
        return self._left_within_a_character(list(prompt))

    def _left_within_a_character(self, prompt: list[int]) -> list[int]:
        """Return the remaining ids if the prompt ends with the first ids of a character."""
        for count in range(1, 4):
            if ENCODING.decode(prompt).endswith("\ufffd") and not ENCODING.decode(prompt[:-count]).endswith("\ufffd"):
                remaining = ENCODING.encode_as_server(self.script[self._said(ENCODING.decode(prompt[:-count])) :])
                return remaining[count:] if remaining[:count] == prompt[-count:] else []
        return []

    def _said(self, marked: str) -> int:
        """Return how many characters of the script a prompt ends with."""
        parts = marked.split(START)
        for first in range(1, len(parts)):
            generated = START.join(parts[first:])
            if self.script.startswith(generated):
                return len(generated)
        raise AssertionError(f"the script does not continue this prompt: {marked[-300:]!r}")


def fake_of(kind: str) -> Any:
    return KINDS[kind].fake()


@asynccontextmanager
async def staged(
    script: str, kinds: Sequence[str], config: Config, **unisono: Any
) -> AsyncIterator[tuple[Play, Gateway]]:
    """Run a gateway with one server of each kind, all with the same model."""
    play = Play(script)
    async with AsyncExitStack() as stack:
        fakes = [(kind, await stack.enter_async_context(fake_of(kind))) for kind in kinds]
        for kind, fake in fakes:
            play.serve(kind, fake)
        settings = config(*(f"{kind}@{fake.url}" for kind, fake in fakes), **unisono)
        yield play, await stack.enter_async_context(gateway(settings))
