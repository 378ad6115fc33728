"""Turns in which the model calls a tool several times before it answers, many at once; a process of its own.

Driven by lines of JSON: one `Ask` in, one `Told` out. A step is what the gateway does between the last token of a call
and the next prompt; the model and the tool server say when those were, in one clock for all processes, and the time
the tool server had the call is taken off.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from bench import http_client, material, readers, wires
from bench.http_client import Lost
from bench.load import quantile
from bench.material import Material
from bench.tally import Tally, answer_lines
from bench.tool_model import ANSWER_TOKENS, LABEL, STEPS, TIMES

TOOLS = [{"type": "mcp", "server_label": LABEL}]


@dataclass(frozen=True, slots=True)
class Ask:
    """`streams` clients at once, each with `requests` loops behind a conversation of `words` words, its own each
    time."""

    port: int
    model: int
    tools: int
    """The ports of the backend and of the tool server, which say when what was."""
    key: str
    streams: int
    requests: int
    words: int
    seed: int
    limit_s: float = 120.0
    """After this what is not over counts as a fault."""


@dataclass(slots=True)
class Told(Tally):
    """Milliseconds of a step, and of the tool server within it."""

    steps: int = 0
    step_p50_ms: float = 0.0
    step_p99_ms: float = 0.0
    tool_p50_ms: float = 0.0


async def run(stuff: Material, ask: Ask) -> Told:
    told = Told()
    # What was before is not asked about.
    await _times(ask.model, TIMES)
    await _times(ask.tools, TIMES)
    requests = [_request(stuff, ask, index) for index in range(ask.streams * ask.requests)]

    async def client(index: int) -> None:
        for request in requests[index :: ask.streams]:
            fault = await _one(stuff, ask, request)
            if fault is not None:
                told.fault(fault)

    begun, cpu = time.monotonic(), time.process_time()
    try:
        async with asyncio.timeout(ask.limit_s), asyncio.TaskGroup() as group:
            for index in range(ask.streams):
                group.create_task(client(index))
    except TimeoutError:
        told.fault(f"not finished after {ask.limit_s:.0f} s")
    told.seconds, told.cpu_s = time.monotonic() - begun, time.process_time() - cpu
    weigh(told, await _times(ask.model, TIMES), await _times(ask.tools, TIMES))
    return told


def weigh(told: Told, prompts: Mapping[str, list[list[float]]], calls: Mapping[str, list[float]]) -> None:
    """The times of the steps, by what was noted of prompts and of calls."""
    own, tool = list[float](), list[float]()
    for number, times in prompts.items():
        for step in range(len(times) - 1):
            if (noted := calls.get(f"{number}-{step}")) is None:
                told.fault(f"step {step} was taken without its tool")
                continue
            asked, answered = noted
            tool.append(answered - asked)
            own.append(times[step + 1][0] - times[step][1] - tool[-1])
    told.steps = len(own)
    told.step_p50_ms, told.step_p99_ms = (1e3 * quantile(own, share) for share in (0.5, 0.99))
    told.tool_p50_ms = 1e3 * quantile(tool, 0.5)


def _request(stuff: Material, ask: Ask, index: int) -> bytes:
    seed = ask.seed * 1_000_003 + index
    question = wires.Question(seed, history=ask.words, history_seed=seed, more={"tools": TOOLS})
    return wires.request("responses", stuff, question, tokens=ANSWER_TOKENS * 8, stream=True, key=ask.key)


async def _one(stuff: Material, ask: Ask, request: bytes) -> str | None:
    """What went wrong with a loop; None when all of it came."""
    reader = LoopReader()
    try:
        status = await http_client.once(ask.port, request, reader.feed)
    except (Lost, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return reader.wrong(status, stuff.answer(ANSWER_TOKENS).content)


class LoopReader:
    """Reads the events of a response whose gateway ran tools."""

    def __init__(self) -> None:
        self._events = readers.Events()
        self._end: dict[str, Any] = {}

    def feed(self, data: bytes) -> None:
        for event in self._events.whole(data):
            name, _, body = event.partition(b"\n")
            if name in readers.ENDS:
                self._end = orjson.loads(body[6:])["response"]

    def wrong(self, status: int, expected: str) -> str | None:
        if status != 200 or not self._end:
            return f"HTTP {status}: {self._events.raw!r}"
        calls = [item for item in self._end["output"] if item["type"] == "mcp_call"]
        failed = [call["error"] for call in calls if call["error"]]
        if failed:
            return f"a call failed: {failed[0]}"
        told = [call["output"] for call in calls]
        if told != [orjson.loads(call["arguments"])["text"] for call in calls] or len(told) != STEPS:
            return f"{len(told)} calls of {STEPS}: {told}, {self._end['status']}, {self._end.get('unisono')}"
        last = self._end["output"][-1]
        if last["type"] != "message" or last["content"][0]["text"] != expected:
            return f"the answer differs: {self._end['status']}"
        return None


async def _times(port: int, path: bytes) -> dict[str, Any]:
    """What a process noted since it was asked last."""
    parts = list[bytes]()
    await http_client.once(port, http_client.message(path.decode(), b""), parts.append)
    noted: dict[str, Any] = orjson.loads(b"".join(parts))
    return noted


def main(path: Path) -> None:
    stuff = material.load(path)
    answer_lines(lambda line: run(stuff, Ask(**orjson.loads(line))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
