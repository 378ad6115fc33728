"""Backend kinds of the contract tests: each with its fake server, and helpers to run it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tests.contract.dialects import LLAMACPP, MLX, OLLAMA_RAW, SGLANG, VLLM, Dialect, template_dialect
from tests.fakes import (
    Close,
    FakeMlxServer,
    FakeVllm,
    Sleep,
    Stall,
    WireServer,
)
from tests.fakes.llamacpp import FakeLlamaCpp
from tests.fakes.ollama import FakeOllama
from tests.fakes.sglang import FakeSglang
from unisono.core.generation import Chunk, CompletionJob, OutputForm, Prompt
from unisono.core.ports import Backend, BackendOptions
from unisono.harmony.encoding import load_encoding
from unisono_adapters.llamacpp import LlamaCppBackend
from unisono_adapters.mlx.mlx_server_backend import MlxServerBackend
from unisono_adapters.ollama import OllamaBackend
from unisono_adapters.replay import ReplayBackend
from unisono_adapters.sglang import SglangBackend
from unisono_adapters.vllm import VllmBackend

# Maximum reaction time. The requirement is 250 ms and an idle machine needs a few; the rest allows for a busy machine.
AT_ONCE_S = 1.0
KEY = "sk-planted-1234567890"

IDS = [200005, 35644, 200008, 2167, 13, 200007, 200006, 173781, 200005, 17196, 200008, 13225, 61138, 236, 0, 200002]
TEXT = '<|channel|>analysis<|message|>Grüße 👩‍👩‍👧 "x"\n<|end|><|start|>assistant<|channel|>final<|message|>完了。'

ENCODING = load_encoding()
PROMPT_TEXT = "<|start|>user<|message|>Hello<|end|><|start|>assistant"
PROMPT = Prompt(tokens=ENCODING.encode_marked(PROMPT_TEXT), text=PROMPT_TEXT)
JOB = CompletionJob(prompt=PROMPT, max_tokens=1000)

Serve = Callable[..., AbstractAsyncContextManager[tuple[Backend, Any]]]


# Context size that no test fills.
LARGE_CONTEXT = 10**8


def on_a_wire(fake: Callable[..., Any], build: Callable[[str], Backend], **defaults: Any) -> Serve:
    """Return a function that serves a kind over HTTP: its fake server and a backend for it."""

    @asynccontextmanager
    async def serve(folder: Path, **script: Any) -> AsyncIterator[tuple[Backend, Any]]:
        async with fake(**{**defaults, **script}) as server:
            backend = build(server.url)
            try:
                yield backend, server
            finally:
                await backend.aclose()

    return serve


def vllm(url: str) -> Backend:
    return VllmBackend(BackendOptions("vllm", "tiny", url + "/v1", KEY))


def sglang(url: str) -> Backend:
    return SglangBackend(BackendOptions("sglang", "tiny", url + "/v1", KEY))


def llamacpp(url: str) -> Backend:
    return LlamaCppBackend(BackendOptions("llamacpp", "tiny", url, KEY))


def mlx_server(url: str) -> Backend:
    return MlxServerBackend(BackendOptions("mlx_server", "some/name", url, KEY))


def ollama_raw(url: str) -> Backend:
    extra = {"route": "raw", "num_ctx": LARGE_CONTEXT}
    return OllamaBackend(BackendOptions("ollama", "gpt-oss:20b", url, KEY, extra))


def ollama_template(url: str) -> Backend:
    extra = {"route": "template", "num_ctx": LARGE_CONTEXT}
    return OllamaBackend(BackendOptions("ollama", "gpt-oss:20b", url, KEY, extra))


@asynccontextmanager
async def replay(folder: Path, **script: Any) -> AsyncIterator[tuple[Backend, Any]]:
    recording = folder / "recording.json"
    recording.write_bytes(orjson.dumps({"turns": [{"tokens": IDS, "finish": script.get("finish", "stop")}]}))
    extra = {"chunk": script.get("per_chunk", 1), "interval_s": script.get("delay_s", 0)}
    yield ReplayBackend(BackendOptions("replay", str(recording), extra=extra)), None


@dataclass(frozen=True)
class Kind:
    """Backend kind: its fake server, output form and protocol.

    `at` builds a backend for an address. `live` is true if output is delivered while it is generated.
    """

    serve: Serve
    output: OutputForm
    dialect: Dialect = VLLM
    at: Callable[[str], Backend] = vllm
    live: bool = True

    def delivered(self, chunks: list[Chunk]) -> object:
        """Return the content of the chunks; only the output form of the kind may have any."""
        if self.output is OutputForm.IDS:
            assert not any(chunk.text for chunk in chunks)
            return [token for chunk in chunks for token in chunk.tokens]
        assert not any(chunk.tokens for chunk in chunks)
        return "".join(chunk.text for chunk in chunks)

    @property
    def answer(self) -> Any:
        return IDS if self.output is OutputForm.IDS else TEXT


TEMPLATE = template_dialect(lambda text: ENCODING.encode_as_server(PROMPT_TEXT + text))
BARE = {"text": TEXT, "bare": True}

KINDS = {
    "vllm": Kind(on_a_wire(FakeVllm, vllm, tokens=IDS), OutputForm.IDS),
    "sglang": Kind(on_a_wire(FakeSglang, sglang, tokens=IDS, context=LARGE_CONTEXT), OutputForm.IDS, SGLANG, sglang),
    "llamacpp": Kind(on_a_wire(FakeLlamaCpp, llamacpp, tokens=IDS), OutputForm.IDS, LLAMACPP, llamacpp),
    "mlx_server": Kind(on_a_wire(FakeMlxServer, mlx_server, text=TEXT), OutputForm.TEXT, MLX, mlx_server),
    "ollama raw": Kind(on_a_wire(FakeOllama, ollama_raw, text=TEXT), OutputForm.TEXT, OLLAMA_RAW, ollama_raw),
    "ollama template": Kind(
        on_a_wire(FakeOllama, ollama_template, **BARE), OutputForm.TEXT, TEMPLATE, ollama_template, live=False
    ),
    "replay": Kind(replay, OutputForm.IDS),
}
HTTP_KINDS = tuple(name for name in KINDS if name != "replay")


async def collect(backend: Backend, job: CompletionJob = JOB) -> list[Chunk]:
    return [chunk async for chunk in backend.complete(job)]


async def collect_until_failure(backend: Backend, job: CompletionJob = JOB) -> tuple[list[Chunk], BaseException | None]:
    chunks: list[Chunk] = []
    try:
        async for chunk in backend.complete(job):
            chunks.append(chunk)
    except Exception as error:
        return chunks, error
    return chunks, None


def backend_at(kind: Kind, server: WireServer | str) -> Backend:
    return kind.at(server if isinstance(server, str) else server.url)


def close_steps() -> list[Any]:
    return [Sleep(0.01), Close()]


def stall_steps() -> list[Any]:
    return [Stall()]


async def drain(stream: AsyncIterator[Chunk]) -> None:
    async for _ in stream:
        pass


class FullBacklog:
    """Listening socket with a full backlog: further connections are never accepted."""

    def __enter__(self) -> str:
        self._sockets = [socket.socket()]
        listener = self._sockets[0]
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            waiting = socket.socket()
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
            self._sockets.append(waiting)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    def __exit__(self, *error: object) -> None:
        for sock in self._sockets:
            sock.close()
