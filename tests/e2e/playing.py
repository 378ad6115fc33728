"""A model with one thing to say, behind servers of every kind: it goes on from wherever the prompt says it is, and the
server may fail it on the way."""

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

Config: TypeAlias = Callable[..., dict[str, Any]]
"""A configuration of deployments, `kind@url`, and settings under `unisono`."""


@dataclass
class Play:
    """`script` is all that is said behind the first `<|start|>assistant`. `failures` are taken one after the other by
    whoever is asked for a stream next: a fault of it, or a refusal. `prompts` are what was asked, as text."""

    script: str
    failures: list[Fault | Refusal] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """The kinds that were asked, in order."""

    def serve(self, kind: str, fake: Any) -> None:
        fake.script = lambda asked: self._answer(kind, asked["prompt"], fails=asked.get("stream") is not False)

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
        # One kind leaves out of a prompt what its server would not bear, and has it said again.
        rest = self.script[self._said(marked) :] if START in marked else START + self.script
        stop = next((stop for stop in STOPS if rest.endswith(stop)), "")
        return SCRIPTS[kind](text=rest.removesuffix(stop), per_chunk=3, **more)

    def _ids_left(self, prompt: Sequence[int]) -> list[int]:
        """The ids to come behind a prompt that ends in some of them; none where they were cut otherwise."""
        whole, start = ENCODING.encode_marked(self.script), ENCODING.encode_marked(START)
        for said in range(len(whole) - 1, -1, -1):
            before = len(prompt) - said
            if list(prompt[before:]) == whole[:said] and list(prompt[before - len(start) : before]) == start:
                return whole[said:]
        return self._left_within_a_character(list(prompt))

    def _left_within_a_character(self, prompt: list[int]) -> list[int]:
        """The same where the prompt is cut otherwise, and ends in the first ids of a character."""
        for begun in range(1, 4):
            if ENCODING.decode(prompt).endswith("\ufffd") and not ENCODING.decode(prompt[:-begun]).endswith("\ufffd"):
                left = ENCODING.encode_as_server(self.script[self._said(ENCODING.decode(prompt[:-begun])) :])
                return left[begun:] if left[:begun] == prompt[-begun:] else []
        return []

    def _said(self, marked: str) -> int:
        """How many characters of the script a prompt ends in."""
        behind = marked.split(START)
        for first in range(1, len(behind)):
            said = START.join(behind[first:])
            if self.script.startswith(said):
                return len(said)
        raise AssertionError(f"a prompt that nothing goes on from: {marked[-300:]!r}")


def fake_of(kind: str) -> Any:
    return KINDS[kind].fake()


@asynccontextmanager
async def staged(
    script: str, kinds: Sequence[str], config: Config, **unisono: Any
) -> AsyncIterator[tuple[Play, Gateway]]:
    """A gateway before one server of each kind, all with the same model."""
    play = Play(script)
    async with AsyncExitStack() as stack:
        fakes = [(kind, await stack.enter_async_context(fake_of(kind))) for kind in kinds]
        for kind, fake in fakes:
            play.serve(kind, fake)
        here = config(*(f"{kind}@{fake.url}" for kind, fake in fakes), **unisono)
        yield play, await stack.enter_async_context(gateway(here))
