"""Scripted backends in separate processes that can be killed and stopped.

Run as a module:

    python -m tests.chaos.backend FOLDER

One process loads everything and forks the backends, so that a killed backend is replaced at once. The process reads
the kind of each backend to start from standard input, one per line, and prints its pid and port. A prompt that no
script continues is logged to a file in FOLDER. All backends end when standard input closes.
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
    """Return the text of each token, as a server sends it.

    The bytes of an incomplete character are sent with the rest of the character. The stop token is not sent.
    """
    decoder = getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(ENCODING.decode_bytes([token])) for token in tokens if token not in STOP_TOKENS]
    return [piece for piece in [*pieces, decoder.decode(b"", final=True)] if piece]


@dataclass(frozen=True)
class Kind:
    """Protocol of a backend, and the conversion of model output to it."""

    fake: Callable[[], Any]
    script: Callable[..., Any]
    held: Callable[[dict[str, Any]], Held | None]
    ids: bool = True

    def said(self, tokens: Sequence[int]) -> Any:
        output = {"tokens": tokens} if self.ids else {"pieces": spelled(tokens)}
        return self.script(delay_s=STEP_S, **output)


KINDS: Mapping[str, Kind] = {
    "vllm": Kind(FakeVllm, VllmScript, constraints.vllm),
    "sglang": Kind(FakeSglang, SglangScript, constraints.sglang),
    "llamacpp": Kind(lambda: FakeLlamaCpp(context=131_072), LlamaCppScript, constraints.llamacpp),
    "ollama": Kind(FakeOllama, OllamaScript, constraints.ollama, ids=False),
    "mlx_server": Kind(FakeMlxServer, MlxScript, lambda asked: None, ids=False),
}


def prompt_of(request: Mapping[str, Any]) -> list[int]:
    """Return the prompt tokens of a request, as the server sees them."""
    prompt = request["prompt"]
    return ENCODING.encode_as_server(prompt) if isinstance(prompt, str) else list(prompt)


def answering(kind: Kind, lost: Path) -> Callable[[dict[str, Any]], Any]:
    """Return a script function that continues the prompt of each request."""

    def script(request: dict[str, Any]) -> Any:
        prompt = prompt_of(request)
        try:
            return kind.said(goes_on(prompt, kind.held(request)))
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
    # No process waits for killed children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            asyncio.run(serve(line.strip(), folder))
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
