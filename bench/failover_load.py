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

from bench import http_client, prose, readers, wires
from bench.breaking_backend import ANSWER_TOKENS, BREAKS_PATH
from bench.http_client import ConnectionLostError
from bench.load import quantile
from bench.prose import Corpus
from bench.vllm_wire import QUESTION_KEY_WORDS
from bench.worker import WorkerResult, serve_lines


@dataclass(frozen=True, slots=True)
class FailoverJob:
    """`streams` clients at once, each with `requests` answers behind a conversation of `words` words, its own each
    time. `models` are the ports of the two backends, which break off as `how` says."""

    variant: str
    port: int
    backend_ports: tuple[int, int]
    key: str
    streams: int
    requests: int
    words: int
    seed: int
    limit_s: float = 120.0
    """After this what is not over counts as a fault."""


@dataclass(slots=True)
class FailoverResult(WorkerResult):
    breaks: int = 0
    gap_p50_ms: float = 0.0
    gap_p99_ms: float = 0.0
    added_p50_ms: float = 0.0
    added_p99_ms: float = 0.0


Spans = Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class BackendTimes:
    """What one backend noted (`break_model.Times`)."""

    broken: Spans = field(default_factory=dict)
    resumed: Spans = field(default_factory=dict)


class ArrivalClock(readers.Clock):
    """When text arrived, in seconds of `time.monotonic`, which is one clock for all processes."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def mark(self, kind: str) -> None:
        super().mark(kind)
        self.times.append(time.monotonic())


async def run(corpus: Corpus, job: FailoverJob) -> FailoverResult:
    result, arrival_times = FailoverResult(), dict[str, Sequence[float]]()
    for port in job.backend_ports:
        await _fetch_times(port, job.variant)
    requests = [_request(corpus, job, index) for index in range(job.streams * job.requests)]

    async def client(index: int) -> None:
        for question, request in requests[index :: job.streams]:
            arrivals, fault = await _run_one(corpus, job.port, request)
            if fault is None:
                arrival_times[question] = arrivals
            else:
                result.add_fault(fault)

    started_at, cpu = time.monotonic(), time.process_time()
    try:
        async with asyncio.timeout(job.limit_s), asyncio.TaskGroup() as group:
            for index in range(job.streams):
                group.create_task(client(index))
    except TimeoutError:
        result.add_fault(f"not finished after {job.limit_s:.0f} s")
    result.seconds, result.cpu_s = time.monotonic() - started_at, time.process_time() - cpu
    compute_gaps(result, arrival_times, [await _fetch_times(port, "") for port in job.backend_ports])
    return result


def compute_gaps(
    result: FailoverResult, arrival_times: Mapping[str, Sequence[float]], backend_times: Sequence[BackendTimes]
) -> None:
    """The gaps of all streams, by when text arrived and by what the backends noted."""
    gaps, added = list[float](), list[float]()
    for question, times in arrival_times.items():
        first = next((notes for notes in backend_times if question in notes.broken), None)
        second = next((notes for notes in backend_times if question in notes.resumed), None)
        if first is None or second is None or first is second:
            result.add_fault("broken off by nobody" if first is None else "continued by nobody else")
            continue
        last_at, broke_at = first.broken[question]
        requested_at, sent_at = second.resumed[question]
        next_index = bisect_left(times, sent_at)
        if not 0 < next_index < len(times):
            result.add_fault("nothing came before the break, or behind it")
            continue
        gaps.append(times[next_index] - times[next_index - 1])
        added.append(gaps[-1] - (broke_at - last_at) - (sent_at - requested_at))
    result.breaks = len(gaps)
    result.gap_p50_ms, result.gap_p99_ms = (1e3 * quantile(gaps, share) for share in (0.5, 0.99))
    result.added_p50_ms, result.added_p99_ms = (1e3 * quantile(added, share) for share in (0.5, 0.99))


def _request(corpus: Corpus, job: FailoverJob, index: int) -> tuple[str, bytes]:
    """A request, and what tells its question from the others at a backend."""
    seed = job.seed * 1_000_003 + index
    question = wires.Question(seed, history=job.words, history_seed=seed)
    words, _ = corpus.prompt(question.words, seed)
    request = wires.request("chat", corpus, question, tokens=ANSWER_TOKENS, stream=True, key=job.key)
    return " ".join(map(str, words[-QUESTION_KEY_WORDS:])), request


async def _run_one(corpus: Corpus, port: int, request: bytes) -> tuple[Sequence[float], str | None]:
    """When the text of an answer came, and what was wrong with it."""
    reader, arrivals = readers.ChatReader(), ArrivalClock()
    reader.clock = arrivals
    try:
        status = await http_client.request_once(port, request, reader.feed)
    except (ConnectionLostError, OSError) as error:
        return (), f"{type(error).__name__}: {error}"
    return arrivals.times, reader.fault(status, corpus.answer(ANSWER_TOKENS))


async def _fetch_times(port: int, variant: str) -> BackendTimes:
    """What a backend noted since it was asked last; from now on it breaks off like this."""
    parts = list[bytes]()
    await http_client.request_once(
        port, http_client.message(BREAKS_PATH.decode(), orjson.dumps({"variant": variant})), parts.append
    )
    return BackendTimes(**orjson.loads(b"".join(parts)))


def main(path: Path) -> None:
    corpus = prose.load(path)
    serve_lines(lambda line: run(corpus, FailoverJob(**orjson.loads(line))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
