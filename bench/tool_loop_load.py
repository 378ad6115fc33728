"""Worker process with concurrent turns of several tool calls and an answer.

The worker reads one `ToolLoopJob` per line of JSON and answers with one `ToolLoopResult`. A step is the time of the
gateway between the last token of a call and the next prompt. The backend and the tool server record these times with a
clock that all processes share. The time of the tool server is subtracted.
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

from bench import http_client, prose, readers, wires
from bench.calling_backend import ANSWER_TOKENS, SERVER_LABEL, STEPS, TIMES_PATH
from bench.http_client import ConnectionLostError
from bench.load import quantile
from bench.prose import Corpus
from bench.worker import WorkerResult, serve_lines

TOOLS = [{"type": "mcp", "server_label": SERVER_LABEL}]


@dataclass(frozen=True, slots=True)
class ToolLoopJob:
    """Load of `streams` concurrent clients with `requests` loops each.

    Each loop follows a new conversation of `words` words.
    """

    port: int
    # Ports of the backend (`model`) and of the tool server, which record the times.
    model: int
    tools: int
    key: str
    streams: int
    requests: int
    words: int
    seed: int
    # Loops that have not ended by then count as one fault.
    limit_s: float = 120.0


@dataclass(slots=True)
class ToolLoopResult(WorkerResult):
    """Milliseconds of a step, and of the tool server during the step."""

    steps: int = 0
    step_p50_ms: float = 0.0
    step_p99_ms: float = 0.0
    tool_p50_ms: float = 0.0


async def run(corpus: Corpus, job: ToolLoopJob) -> ToolLoopResult:
    result = ToolLoopResult()
    # Clear the times of earlier loops.
    await _fetch_times(job.model, TIMES_PATH)
    await _fetch_times(job.tools, TIMES_PATH)
    requests = [_request(corpus, job, index) for index in range(job.streams * job.requests)]

    async def client(index: int) -> None:
        for request in requests[index :: job.streams]:
            fault = await _run_one(corpus, job, request)
            if fault is not None:
                result.add_fault(fault)

    started_at, cpu = time.monotonic(), time.process_time()
    try:
        async with asyncio.timeout(job.limit_s), asyncio.TaskGroup() as group:
            for index in range(job.streams):
                group.create_task(client(index))
    except TimeoutError:
        result.add_fault(f"not finished after {job.limit_s:.0f} s")
    result.seconds, result.cpu_s = time.monotonic() - started_at, time.process_time() - cpu
    compute_steps(result, await _fetch_times(job.model, TIMES_PATH), await _fetch_times(job.tools, TIMES_PATH))
    return result


def compute_steps(
    result: ToolLoopResult, prompts: Mapping[str, list[list[float]]], calls: Mapping[str, list[float]]
) -> None:
    """Add the times of all steps to `result`, from the times of prompts and calls."""
    step_times, tool_times = list[float](), list[float]()
    for number, times in prompts.items():
        for step in range(len(times) - 1):
            if (recorded := calls.get(f"{number}-{step}")) is None:
                result.add_fault(f"step {step} has no tool call")
                continue
            received_at, answered_at = recorded
            tool_times.append(answered_at - received_at)
            step_times.append(times[step + 1][0] - times[step][1] - tool_times[-1])
    result.steps = len(step_times)
    result.step_p50_ms, result.step_p99_ms = (1e3 * quantile(step_times, share) for share in (0.5, 0.99))
    result.tool_p50_ms = 1e3 * quantile(tool_times, 0.5)


def _request(corpus: Corpus, job: ToolLoopJob, index: int) -> bytes:
    seed = job.seed * 1_000_003 + index
    question = wires.Question(seed, history=job.words, history_seed=seed, extra_fields={"tools": TOOLS})
    return wires.request("responses", corpus, question, tokens=ANSWER_TOKENS * 8, stream=True, key=job.key)


async def _run_one(corpus: Corpus, job: ToolLoopJob, request: bytes) -> str | None:
    """Return the fault of one loop, or None."""
    reader = LoopReader()
    try:
        status = await http_client.request_once(job.port, request, reader.feed)
    except (ConnectionLostError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return reader.fault(status, corpus.answer(ANSWER_TOKENS).content)


class LoopReader:
    """Reader of the events of a response with tools that the gateway ran."""

    def __init__(self) -> None:
        self._events = readers.Events()
        self._end: dict[str, Any] = {}

    def feed(self, data: bytes) -> None:
        for event in self._events.split(data):
            name, _, body = event.partition(b"\n")
            if name in readers.END_EVENTS:
                self._end = orjson.loads(body[6:])["response"]

    def fault(self, status: int, expected: str) -> str | None:
        if status != 200 or not self._end:
            return f"HTTP {status}: {self._events.raw!r}"
        calls = [item for item in self._end["output"] if item["type"] == "mcp_call"]
        failed = [call["error"] for call in calls if call["error"]]
        if failed:
            return f"a tool call failed: {failed[0]}"
        outputs = [call["output"] for call in calls]
        if outputs != [orjson.loads(call["arguments"])["text"] for call in calls] or len(outputs) != STEPS:
            return f"{len(outputs)} of {STEPS} tool calls: {outputs}, {self._end['status']}, {self._end.get('unisono')}"
        last = self._end["output"][-1]
        if last["type"] != "message" or last["content"][0]["text"] != expected:
            return f"the answer differs: {self._end['status']}"
        return None


async def _fetch_times(port: int, path: bytes) -> dict[str, Any]:
    """Return and clear the recorded times of a process."""
    parts = list[bytes]()
    await http_client.request_once(port, http_client.message(path.decode(), b""), parts.append)
    recorded: dict[str, Any] = orjson.loads(b"".join(parts))
    return recorded


def main(path: Path) -> None:
    corpus = prose.load(path)
    serve_lines(lambda line: run(corpus, ToolLoopJob(**orjson.loads(line))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
