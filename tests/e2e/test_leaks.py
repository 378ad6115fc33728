"""Streams by the thousand, a quarter of them broken off at any point: what is left behind is nothing, and a stream that
runs beside them all is never kept waiting for long."""

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
AT_ONCE = 64
WARM = 500
"""Streams before anything is measured: pools, caches and the allocator are as large as they get."""
ROUNDS = 10
SPOOL_FILES = 1  # a process creates its usage spool with the first record that the store is slow to take
ABORTED = 0.25
THOUGHT = "<|channel|>analysis<|message|>Hm, let me think about it.<|end|><|start|>assistant"
ANSWERS = (
    THOUGHT + "<|channel|>final<|message|>" + "Here is what I think of it. " * 4 + "<|return|>",
    THOUGHT + '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"sky"}<|call|>',
    "<|channel|>final<|message|>Yes.<|return|>",
)
OFTEN = (20, 1, 20)
"""How often which is given. What was called is remembered, on purpose and within bounds, so it grows for a while."""
ASKED = [f"Question {number}?" for number in range(40)]
"""What was asked is remembered, too."""
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
CANARY_STEP_S = 0.02


def chat(rng: random.Random) -> bytes:
    body = {
        "model": "gpt-oss",
        "messages": [{"role": "user", "content": rng.choice(ASKED)}],
        "tools": [{"type": "function", "function": TOOL}],
        "stream": rng.random() < 0.8,
    }
    return request("POST", "/v1/chat/completions", body)


def responses(rng: random.Random) -> bytes:
    body = {
        "model": "gpt-oss",
        "input": rng.choice(ASKED),
        "tools": [{"type": "function", **TOOL}],
        "stream": rng.random() < 0.8,
        "store": rng.random() < 0.2,
    }
    return request("POST", "/v1/responses", body)


@dataclass
class Load:
    """Streams against one gateway. `whole` and `broken` count how they ended; a `wrong` one is kept as it came."""

    url: str
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    whole: int = 0
    broken: int = 0
    wrong: list[bytes] = field(default_factory=list)

    async def run(self, count: int) -> None:
        left = iter(range(count))

        async def one_after_the_other() -> None:
            for _ in left:
                await self._stream()

        await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))

    async def _stream(self) -> None:
        asked = self.rng.choice((chat, responses))(self.rng)
        host, _, port = self.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            if self.rng.random() < ABORTED:
                await self._break_off(asked, reader, writer)
            else:
                writer.write(asked.replace(b"host:", b"connection: close\r\nhost:", 1))
                heard = await reader.read()
                self.whole += 1
                if not heard.startswith(b"HTTP/1.1 200 ") or not heard.endswith((b"\r\n0\r\n\r\n", b"}")):
                    self.wrong.append(heard)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _break_off(self, asked: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Amid the own request, before the answer, or anywhere in it; politely or not."""
        self.broken += 1
        part = self.rng.choice((self.rng.randrange(1, len(asked)), len(asked), len(asked)))
        writer.write(asked[:part])
        if part == len(asked) and self.rng.random() < 0.7:
            await reader.read(self.rng.randrange(1, 4000))
        else:
            await asyncio.sleep(self.rng.random() * 0.02)
        if self.rng.random() < 0.5:
            writer.transport.abort()


class Canary:
    """A slow stream beside the load; `gaps` are the seconds between what came of it."""

    def __init__(self) -> None:
        self.gaps: list[float] = []

    async def sing(self, url: str) -> None:
        while True:
            await self._song(url)

    async def _song(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        asked = {"model": "gpt-oss-canary", "messages": [{"role": "user", "content": "Sing"}], "stream": True}
        writer.write(request("POST", "/v1/chat/completions", asked).replace(b"host:", b"connection: close\r\nhost:", 1))
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
class Place:
    running: Replica
    fake: FakeVllm
    canary: Canary

    @property
    def pid(self) -> int:
        assert self.running.process is not None
        return self.running.process.pid

    def holdings(self) -> Holdings:
        return holdings(self.pid)

    async def over(self) -> None:
        """Wait until no backend works for a client that has left."""
        async with asyncio.timeout(5):
            while any(seen.done_at is None and seen.gone_at is None for seen in self.fake.requests):
                await asyncio.sleep(0.02)

    async def calm(self, before: Holdings) -> None:
        """Wait until nothing of the load is left; connections to backends are kept for some seconds on purpose."""
        await self.over()
        async with asyncio.timeout(15):
            while self.holdings().descriptors > before.descriptors + SPOOL_FILES:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def place(folder: Path) -> AsyncIterator[Place]:
    scripts = [VllmScript(tokens=ENCODING.encode_marked(said), delay_s=0.0005, per_chunk=4) for said in ANSWERS]
    rng = random.Random(2)
    notes = " ".join(rng.choices(("do", "re", "mi", "fa", "so", "la", "ti"), k=3_000))
    song = VllmScript(tokens=ENCODING.encode_marked(f"<|channel|>final<|message|>{notes}"), delay_s=CANARY_STEP_S)
    async with (
        FakeVllm(script=lambda asked: rng.choices(scripts, OFTEN)[0]) as fake,
        FakeVllm(script=lambda _: song) as slow,
    ):
        names = {"gpt-oss": fake, "gpt-oss-canary": slow}
        entries: list[dict[str, Any]] = [
            {"model_name": name, "litellm_params": {"model": "vllm/tiny", "api_base": server.url}}
            for name, server in names.items()
        ]
        config = {"model_list": entries, "store": {"url": f"sqlite://{folder}/state.db"}}
        async with replica(folder, config) as running:
            canary = Canary()
            singing = asyncio.create_task(canary.sing(running.url))
            try:
                yield Place(running, fake, canary)
            finally:
                singing.cancel()
                await asyncio.gather(singing, return_exceptions=True)


def slope(values: Sequence[float]) -> float:
    """Of the line through `values`, per step."""
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    return sum((at - middle) * (value - mean) for at, value in enumerate(values)) / sum(
        (at - middle) ** 2 for at in range(len(values))
    )


async def nothing_is_left(folder: Path, count: int, most_bytes_per_stream: float, most_gap_s: float) -> None:
    async with place(folder) as here:
        load = Load(here.running.url)
        before = here.holdings()
        await load.run(WARM)
        warm = here.holdings()
        memory = []
        for _ in range(ROUNDS):
            here.fake.requests.clear()
            await load.run(count // ROUNDS)
            await here.over()
            memory.append(here.holdings().memory)
        await here.calm(before)
        after = here.holdings()
        each = slope(memory[ROUNDS // 2 :]) / (count / ROUNDS)
        report = {
            "streams": load.whole,
            "broken off": load.broken,
            "bytes per stream": round(each),
            "memory": [round(size / KB) for size in memory],
            "descriptors": (before.descriptors, after.descriptors),
            "threads": (warm.threads, after.threads),
            "canary p99 ms": round(here.canary.p99_s * 1000, 1),
            "canary worst ms": round(max(here.canary.gaps) * 1000, 1),
        }
        print(json.dumps(report))
        assert load.wrong == []
        assert load.broken > load.whole / 5
        assert after.threads <= warm.threads
        assert each < most_bytes_per_stream, report
        assert here.canary.p99_s < most_gap_s, report
        assert here.running.log == "" or "ERROR" not in here.running.log


@pytest.mark.slow
async def test_fifteen_hundred_streams_leave_nothing_behind(tmp_path: Path) -> None:
    await nothing_is_left(tmp_path, 1_500, most_bytes_per_stream=4_000, most_gap_s=0.25)


@pytest.mark.slow
@pytest.mark.timeout(1_200)
async def test_twenty_thousand_streams_leave_nothing_behind(tmp_path: Path) -> None:
    # Caches go on filling to their bounds; a task left by each stream that was broken off is three times as much.
    await nothing_is_left(tmp_path, 20_000, most_bytes_per_stream=250, most_gap_s=0.25)
