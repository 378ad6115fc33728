"""The backend kinds the contract suite runs over, each with its fake, and the ways to use one."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tests.fakes import (
    Close,
    FakeMlxServer,
    FakeVllm,
    Sleep,
    Stall,
    WireServer,
)
from unisono.core.generation import Chunk, Form, Generation, Prompt
from unisono.core.ports import Backend, BackendOptions
from unisono_adapters.mlx_server import MlxServerBackend
from unisono_adapters.replay import ReplayBackend
from unisono_adapters.vllm import VllmBackend

AT_ONCE_S = 0.25
KEY = "sk-planted-1234567890"

IDS = [200005, 35644, 200008, 2167, 13, 200007, 200006, 173781, 200005, 17196, 200008, 13225, 61138, 236, 0, 200002]
TEXT = '<|channel|>analysis<|message|>Grüße 👩‍👩‍👧 "x"\n<|end|><|start|>assistant<|channel|>final<|message|>完了。'

PROMPT = Prompt(
    tokens=(200006, 1428, 200008, 13225, 200007, 200006, 173781), text="<|start|>user<|message|>Hello<|end|>"
)
JOB = Generation(prompt=PROMPT, max_tokens=1000)

Serve = Callable[..., AbstractAsyncContextManager[tuple[Backend, Any]]]


@asynccontextmanager
async def vllm(folder: Path, **script: Any) -> AsyncIterator[tuple[Backend, Any]]:
    async with FakeVllm(**{"tokens": IDS, **script}) as fake:
        backend = VllmBackend(BackendOptions("vllm", "tiny", fake.url + "/v1", KEY))
        try:
            yield backend, fake
        finally:
            await backend.aclose()


@asynccontextmanager
async def mlx_server(folder: Path, **script: Any) -> AsyncIterator[tuple[Backend, Any]]:
    async with FakeMlxServer(**{"text": TEXT, **script}) as fake:
        backend = MlxServerBackend(BackendOptions("mlx_server", "some/name", fake.url, KEY))
        try:
            yield backend, fake
        finally:
            await backend.aclose()


@asynccontextmanager
async def replay(folder: Path, **script: Any) -> AsyncIterator[tuple[Backend, Any]]:
    recording = folder / "recording.json"
    recording.write_bytes(orjson.dumps({"turns": [{"tokens": IDS, "finish": script.get("finish", "stop")}]}))
    extra = {"chunk": script.get("per_chunk", 1), "interval_s": script.get("delay_s", 0)}
    yield ReplayBackend(BackendOptions("replay", str(recording), extra=extra)), None


@dataclass(frozen=True)
class Kind:
    serve: Serve
    output: Form

    def delivered(self, chunks: list[Chunk]) -> object:
        """What the chunks bring, in the form the kind speaks; the other form has to be empty."""
        if self.output is Form.IDS:
            assert not any(chunk.text for chunk in chunks)
            return [token for chunk in chunks for token in chunk.tokens]
        assert not any(chunk.tokens for chunk in chunks)
        return "".join(chunk.text for chunk in chunks)

    @property
    def answer(self) -> Any:
        return IDS if self.output is Form.IDS else TEXT


KINDS = {
    "vllm": Kind(vllm, Form.IDS),
    "mlx_server": Kind(mlx_server, Form.TEXT),
    "replay": Kind(replay, Form.IDS),
}
ON_A_WIRE = ("vllm", "mlx_server")


async def collect(backend: Backend, job: Generation = JOB) -> list[Chunk]:
    return [chunk async for chunk in backend.complete(job)]


async def collect_until_failure(backend: Backend, job: Generation = JOB) -> tuple[list[Chunk], BaseException | None]:
    chunks: list[Chunk] = []
    try:
        async for chunk in backend.complete(job):
            chunks.append(chunk)
    except Exception as error:
        return chunks, error
    return chunks, None


def point(kind: Kind, server: WireServer | str) -> Backend:
    url = server if isinstance(server, str) else server.url
    if kind.output is Form.IDS:
        return VllmBackend(BackendOptions("vllm", "tiny", url))
    return MlxServerBackend(BackendOptions("mlx_server", "tiny", url))


def closing() -> list[Any]:
    return [Sleep(0.01), Close()]


def forever() -> list[Any]:
    return [Stall()]


async def drain(stream: AsyncIterator[Chunk]) -> None:
    async for _ in stream:
        pass


class Deaf:
    """A listening socket whose queue is full: the next connection is never answered."""

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
