"""Scripted backends as processes of their own, that can be killed and stopped like any other. One process that has
loaded everything forks them, so that one that died is back at once; run as a module.

    python -m tests.chaos.backend FOLDER

Reads the kind of each backend to start, one a line, and prints its pid and its port. Whatever a backend was asked that
no script goes on from is a line in a file of FOLDER. All of them end with its standard input.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.model import Lost, goes_on
from tests.chaos.talks import ENCODING
from tests.fakes import FakeMlxServer, FakeVllm, MlxScript, Refusal, VllmScript, constraints
from tests.fakes.constraints import Held
from tests.fakes.llamacpp import FakeLlamaCpp, LlamaCppScript
from tests.fakes.ollama import FakeOllama, OllamaScript
from tests.fakes.sglang import FakeSglang, SglangScript
from unisono.core.generation import STOP_TOKENS

STEP_S = 0.001
LOST = "lost.txt"


def spelled(tokens: Sequence[int]) -> list[str]:
    """As a server shows tokens one by one: the bytes of half a character come with its other half. The stop token is
    not shown."""
    decoder = getincrementaldecoder("utf-8")("replace")
    shown = [decoder.decode(ENCODING.decode_bytes([token])) for token in tokens if token not in STOP_TOKENS]
    return [piece for piece in [*shown, decoder.decode(b"", final=True)] if piece]


@dataclass(frozen=True)
class Kind:
    """A wire, and how what the model says goes over it."""

    fake: Callable[[], Any]
    script: Callable[..., Any]
    held: Callable[[dict[str, Any]], Held | None]
    ids: bool = True

    def said(self, tokens: Sequence[int]) -> Any:
        shown = {"tokens": tokens} if self.ids else {"pieces": spelled(tokens)}
        return self.script(delay_s=STEP_S, **shown)


KINDS: Mapping[str, Kind] = {
    "vllm": Kind(FakeVllm, VllmScript, constraints.vllm),
    "sglang": Kind(FakeSglang, SglangScript, constraints.sglang),
    "llamacpp": Kind(lambda: FakeLlamaCpp(context=131_072), LlamaCppScript, constraints.llamacpp),
    "ollama": Kind(FakeOllama, OllamaScript, constraints.ollama, ids=False),
    "mlx_server": Kind(FakeMlxServer, MlxScript, lambda asked: None, ids=False),
}


def prompt_of(asked: Mapping[str, Any]) -> list[int]:
    """The tokens a server has for what it was sent."""
    prompt = asked["prompt"]
    return ENCODING.encode_as_server(prompt) if isinstance(prompt, str) else list(prompt)


def answering(kind: Kind, lost: Path) -> Callable[[dict[str, Any]], Any]:
    def script(asked: dict[str, Any]) -> Any:
        prompt = prompt_of(asked)
        try:
            return kind.said(goes_on(prompt, kind.held(asked)))
        except Lost as error:
            with lost.open("a") as file:
                file.write(f"{error}: ...{ENCODING.decode(prompt)[-400:]!r}\n")
            return Refusal(400, b'{"error":{"message":"no script goes on from here"}}')

    return script


async def serve(name: str, folder: Path) -> None:
    kind = KINDS[name]
    fake = kind.fake()
    fake.script = answering(kind, folder / LOST)
    async with fake:
        print(os.getpid(), fake.port, flush=True)
        await asyncio.Event().wait()


def main(folder: Path) -> None:
    # Nobody waits for those that are killed.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            asyncio.run(serve(line.strip(), folder))
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
