"""Thousands of streams, a quarter of them aborted at any point, leave no resources behind.

A slow canary stream runs beside them and must not stall.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest

from tests.e2e.processes import KB, Holdings, holdings
from tests.e2e.replicas import Replica, replica
from tests.e2e.slow_clients import request
from tests.fakes import FakeVllm, VllmScript
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
CONCURRENCY = 64
# Streams before the first measurement: pools, caches and the allocator reach their size.
WARM_UP_STREAMS = 500
ROUNDS = 10
SPOOL_FILES = 1  # a process creates its usage spool with the first record that the store is slow to take
ABORTED = 0.25
THOUGHT = "<|channel|>analysis<|message|>Hm, let me think about it.<|end|><|start|>assistant"
ANSWERS = (
    THOUGHT + "<|channel|>final<|message|>" + "Here is what I think of it. " * 4 + "<|return|>",
    THOUGHT + '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"sky"}<|call|>',
    "<|channel|>final<|message|>Yes.<|return|>",
)
# Weights of the answers. Tool calls are cached within limits on purpose, so memory grows for a while.
WEIGHTS = (20, 1, 20)
# Prompts; they are cached within limits, too.
PROMPTS = [f"Question {number}?" for number in range(40)]
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
CANARY_STEP_S = 0.02


def chat(rng: random.Random) -> bytes:
    body = {
        "model": "gpt-oss",
        "messages": [{"role": "user", "content": rng.choice(PROMPTS)}],
        "tools": [{"type": "function", "function": TOOL}],
        "stream": rng.random() < 0.8,
    }
    return request("POST", "/v1/chat/completions", body)


def responses(rng: random.Random) -> bytes:
    body = {
        "model": "gpt-oss",
        "input": rng.choice(PROMPTS),
        "tools": [{"type": "function", **TOOL}],
        "stream": rng.random() < 0.8,
        "store": rng.random() < 0.2,
    }
    return request("POST", "/v1/responses", body)


@dataclass
class Load:
    """Streams against one gateway.

    `whole` and `aborted` count how they ended; `unexpected` holds unexpected responses.
    """

    url: str
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    whole: int = 0
    aborted: int = 0
    unexpected: list[bytes] = field(default_factory=list)

    async def run(self, count: int) -> None:
        left = iter(range(count))

        async def worker() -> None:
            for _ in left:
                await self._stream()

        await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))

    async def _stream(self) -> None:
        request_bytes = self.rng.choice((chat, responses))(self.rng)
        host, _, port = self.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            if self.rng.random() < ABORTED:
                await self._abort(request_bytes, reader, writer)
            else:
                writer.write(request_bytes.replace(b"host:", b"connection: close\r\nhost:", 1))
                response = await reader.read()
                self.whole += 1
                if not response.startswith(b"HTTP/1.1 200 ") or not response.endswith((b"\r\n0\r\n\r\n", b"}")):
                    self.unexpected.append(response)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _abort(self, request_bytes: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Abort while sending the request, before the response or during it; by close or by reset."""
        self.aborted += 1
        length = self.rng.choice((self.rng.randrange(1, len(request_bytes)), len(request_bytes), len(request_bytes)))
        writer.write(request_bytes[:length])
        if length == len(request_bytes) and self.rng.random() < 0.7:
            await reader.read(self.rng.randrange(1, 4000))
        else:
            await asyncio.sleep(self.rng.random() * 0.02)
        if self.rng.random() < 0.5:
            writer.transport.abort()


class Canary:
    """A slow stream beside the load; `gaps` are the seconds between its chunks."""

    def __init__(self) -> None:
        self.gaps: list[float] = []

    async def listen(self, url: str) -> None:
        while True:
            await self._stream_once(url)

    async def _stream_once(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = {"model": "gpt-oss-canary", "messages": [{"role": "user", "content": "Sing"}], "stream": True}
        writer.write(request("POST", "/v1/chat/completions", body).replace(b"host:", b"connection: close\r\nhost:", 1))
        last = None
        try:
            while await reader.read(65536):
                now = time.monotonic()
                if last is not None:
                    self.gaps.append(now - last)
                last = now
        finally:
            writer.close()

    @property
    def p99_s(self) -> float:
        return quantiles(self.gaps, n=100)[-1]


@dataclass
class Setup:
    running: Replica
    fake: FakeVllm
    canary: Canary

    @property
    def pid(self) -> int:
        assert self.running.process is not None
        return self.running.process.pid

    def holdings(self) -> Holdings:
        return holdings(self.pid)

    async def until_idle(self) -> None:
        """Wait until no backend generates for a disconnected client."""
        async with asyncio.timeout(5):
            while any(seen.done_at is None and seen.gone_at is None for seen in self.fake.requests):
                await asyncio.sleep(0.02)

    async def until_released(self, before: Holdings) -> None:
        """Wait until the descriptors of the load are closed.

        Connections to backends stay open for some seconds on purpose.
        """
        await self.until_idle()
        async with asyncio.timeout(15):
            while self.holdings().descriptors > before.descriptors + SPOOL_FILES:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def running_setup(folder: Path) -> AsyncIterator[Setup]:
    scripts = [VllmScript(tokens=ENCODING.encode_marked(answer), delay_s=0.0005, per_chunk=4) for answer in ANSWERS]
    rng = random.Random(2)
    words = " ".join(rng.choices(("do", "re", "mi", "fa", "so", "la", "ti"), k=3_000))
    script = VllmScript(tokens=ENCODING.encode_marked(f"<|channel|>final<|message|>{words}"), delay_s=CANARY_STEP_S)
    async with (
        FakeVllm(script=lambda body: rng.choices(scripts, WEIGHTS)[0]) as fake,
        FakeVllm(script=lambda _: script) as slow,
    ):
        names = {"gpt-oss": fake, "gpt-oss-canary": slow}
        entries: list[dict[str, Any]] = [
            {"model_name": name, "litellm_params": {"model": "vllm/tiny", "api_base": server.url}}
            for name, server in names.items()
        ]
        config = {"model_list": entries, "store": {"url": f"sqlite://{folder}/state.db"}}
        async with replica(folder, config) as running:
            canary = Canary()
            singing = asyncio.create_task(canary.listen(running.url))
            try:
                yield Setup(running, fake, canary)
            finally:
                singing.cancel()
                await asyncio.gather(singing, return_exceptions=True)


def slope(values: Sequence[float]) -> float:
    """Return the slope per step of the regression line through `values`."""
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    return sum((at - middle) * (value - mean) for at, value in enumerate(values)) / sum(
        (at - middle) ** 2 for at in range(len(values))
    )


async def assert_no_leaks(folder: Path, count: int, max_bytes_per_stream: float, max_gap_s: float) -> None:
    async with running_setup(folder) as setup:
        load = Load(setup.running.url)
        before = setup.holdings()
        await load.run(WARM_UP_STREAMS)
        warmed_up = setup.holdings()
        memory = []
        for _ in range(ROUNDS):
            setup.fake.requests.clear()
            await load.run(count // ROUNDS)
            await setup.until_idle()
            memory.append(setup.holdings().memory)
        await setup.until_released(before)
        after = setup.holdings()
        bytes_per_stream = slope(memory[ROUNDS // 2 :]) / (count / ROUNDS)
        report = {
            "streams": load.whole,
            "broken off": load.aborted,
            "bytes per stream": round(bytes_per_stream),
            "memory": [round(size / KB) for size in memory],
            "descriptors": (before.descriptors, after.descriptors),
            "threads": (warmed_up.threads, after.threads),
            "canary p99 ms": round(setup.canary.p99_s * 1000, 1),
            "canary worst ms": round(max(setup.canary.gaps) * 1000, 1),
        }
        print(json.dumps(report))
        assert load.unexpected == []
        assert load.aborted > load.whole / 5
        assert after.threads <= warmed_up.threads
        assert bytes_per_stream < max_bytes_per_stream, report
        assert setup.canary.p99_s < max_gap_s, report
        assert setup.running.log == "" or "ERROR" not in setup.running.log


@pytest.mark.slow
async def test_1500_streams_leak_no_resources(tmp_path: Path) -> None:
    # Caches still fill during so few streams: a step of 2 MB in one of the last rounds is up to 6,000 bytes per stream.
    await assert_no_leaks(tmp_path, 1_500, max_bytes_per_stream=10_000, max_gap_s=0.25)


@pytest.mark.slow
@pytest.mark.timeout(1_800)
async def test_32000_streams_leak_no_resources(tmp_path: Path) -> None:
    # Caches and allocator reach their size after about 15,000 streams; the second half is measured. From then on, a
    # stream added 10 to 60 bytes in a run of 60,000. A leaked task per aborted stream would be 750.
    await assert_no_leaks(tmp_path, 32_000, max_bytes_per_stream=250, max_gap_s=0.25)
