"""Streams whose backend breaks off in the middle, while another one goes on; a process of its own.

Driven by lines of JSON: one `Ask` in, one `Told` out. A gap is what a client sees, from the last text before the break
to the first behind it. What the gateway adds to it is the gap without the second backend's own time to its first token
and without the time the first one took to die: both backends say how long that was. The text has to be, byte for byte,
that of an answer nobody disturbed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from bench import http_client, material, readers, wires
from bench.break_model import ANSWER_TOKENS, BREAKS
from bench.http_client import Lost
from bench.load import quantile
from bench.material import Material
from bench.tally import Tally, answer_lines
from bench.vllm_wire import ASKED_WORDS


@dataclass(frozen=True, slots=True)
class Ask:
    """`streams` clients at once, each with `requests` answers behind a conversation of `words` words, its own each
    time. `models` are the ports of the two backends, which break off as `how` says."""

    how: str
    port: int
    models: tuple[int, int]
    key: str
    streams: int
    requests: int
    words: int
    seed: int
    limit_s: float = 120.0
    """After this what is not over counts as a fault."""


@dataclass(slots=True)
class Told(Tally):
    breaks: int = 0
    gap_p50_ms: float = 0.0
    gap_p99_ms: float = 0.0
    added_p50_ms: float = 0.0
    added_p99_ms: float = 0.0


Spans = Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Noted:
    """What one backend noted (`break_model.Times`)."""

    broken: Spans = field(default_factory=dict)
    resumed: Spans = field(default_factory=dict)


class Arrivals(readers.Clock):
    """When text arrived, in seconds of `time.monotonic`, which is one clock for all processes."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def mark(self, kind: str) -> None:
        super().mark(kind)
        self.times.append(time.monotonic())


async def run(stuff: Material, ask: Ask) -> Told:
    told, seen = Told(), dict[str, Sequence[float]]()
    for model in ask.models:
        await _noted(model, ask.how)
    requests = [_request(stuff, ask, index) for index in range(ask.streams * ask.requests)]

    async def client(index: int) -> None:
        for question, request in requests[index :: ask.streams]:
            arrivals, fault = await _one(stuff, ask.port, request)
            if fault is None:
                seen[question] = arrivals
            else:
                told.fault(fault)

    begun, cpu = time.monotonic(), time.process_time()
    try:
        async with asyncio.timeout(ask.limit_s), asyncio.TaskGroup() as group:
            for index in range(ask.streams):
                group.create_task(client(index))
    except TimeoutError:
        told.fault(f"not finished after {ask.limit_s:.0f} s")
    told.seconds, told.cpu_s = time.monotonic() - begun, time.process_time() - cpu
    weigh(told, seen, [await _noted(model, "") for model in ask.models])
    return told


def weigh(told: Told, seen: Mapping[str, Sequence[float]], noted: Sequence[Noted]) -> None:
    """The gaps of all streams, by when text arrived and by what the backends noted."""
    gaps, added = list[float](), list[float]()
    for question, times in seen.items():
        first = next((one for one in noted if question in one.broken), None)
        second = next((one for one in noted if question in one.resumed), None)
        if first is None or second is None or first is second:
            told.fault("broken off by nobody" if first is None else "continued by nobody else")
            continue
        last_at, broke_at = first.broken[question]
        asked_at, sent_at = second.resumed[question]
        behind = bisect_left(times, sent_at)
        if not 0 < behind < len(times):
            told.fault("nothing came before the break, or behind it")
            continue
        gaps.append(times[behind] - times[behind - 1])
        added.append(gaps[-1] - (broke_at - last_at) - (sent_at - asked_at))
    told.breaks = len(gaps)
    told.gap_p50_ms, told.gap_p99_ms = (1e3 * quantile(gaps, share) for share in (0.5, 0.99))
    told.added_p50_ms, told.added_p99_ms = (1e3 * quantile(added, share) for share in (0.5, 0.99))


def _request(stuff: Material, ask: Ask, index: int) -> tuple[str, bytes]:
    """A request, and what tells its question from the others at a backend."""
    seed = ask.seed * 1_000_003 + index
    question = wires.Question(seed, history=ask.words, history_seed=seed)
    words, _ = stuff.prompt(question.words, seed)
    request = wires.request("chat", stuff, question, tokens=ANSWER_TOKENS, stream=True, key=ask.key)
    return " ".join(map(str, words[-ASKED_WORDS:])), request


async def _one(stuff: Material, port: int, request: bytes) -> tuple[Sequence[float], str | None]:
    """When the text of an answer came, and what was wrong with it."""
    reader, arrivals = readers.ChatReader(), Arrivals()
    reader.clock = arrivals
    try:
        status = await http_client.once(port, request, reader.feed)
    except (Lost, OSError) as error:
        return (), f"{type(error).__name__}: {error}"
    return arrivals.times, reader.fault(status, stuff.answer(ANSWER_TOKENS))


async def _noted(port: int, how: str) -> Noted:
    """What a backend noted since it was asked last; from now on it breaks off like this."""
    parts = list[bytes]()
    await http_client.once(port, http_client.message(BREAKS.decode(), orjson.dumps({"how": how})), parts.append)
    return Noted(**orjson.loads(b"".join(parts)))


def main(path: Path) -> None:
    stuff = material.load(path)
    answer_lines(lambda line: run(stuff, Ask(**orjson.loads(line))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
