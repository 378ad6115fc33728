"""Worker process with streams whose backend breaks off and another one continues.

The worker reads one `FailoverJob` per line of JSON and answers with one `FailoverResult`. A gap is the time that a
client waits between the last text before the break and the first text after it. The added time is this gap without two
durations that the backends report: the first one's delay before the break, and the second one's time to its first
token. The text must equal that of an undisturbed answer byte for byte.
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
    """Load of `streams` concurrent clients with `requests` answers each.

    Each answer follows a new conversation of `words` words. `backend_ports` are the two backends, which break off as
    `variant` names.
    """

    variant: str
    port: int
    backend_ports: tuple[int, int]
    key: str
    streams: int
    requests: int
    words: int
    seed: int
    # Streams that have not ended by then count as one fault.
    limit_s: float = 120.0


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
    """Times that one backend recorded (`breaking_backend.BreakTimes`)."""

    broken: Spans = field(default_factory=dict)
    resumed: Spans = field(default_factory=dict)


class ArrivalClock(readers.Clock):
    """Arrival times of text, in seconds of `time.monotonic`, which all processes share."""

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
    """Add the gaps of all streams to `result`, from arrival times and the backends' times."""
    gaps, added = list[float](), list[float]()
    for question, times in arrival_times.items():
        first = next((notes for notes in backend_times if question in notes.broken), None)
        second = next((notes for notes in backend_times if question in notes.resumed), None)
        if first is None or second is None or first is second:
            result.add_fault("no backend broke off" if first is None else "no other backend continued")
            continue
        last_at, broke_at = first.broken[question]
        requested_at, sent_at = second.resumed[question]
        next_index = bisect_left(times, sent_at)
        if not 0 < next_index < len(times):
            result.add_fault("no text arrived before or after the break")
            continue
        gaps.append(times[next_index] - times[next_index - 1])
        added.append(gaps[-1] - (broke_at - last_at) - (sent_at - requested_at))
    result.breaks = len(gaps)
    result.gap_p50_ms, result.gap_p99_ms = (1e3 * quantile(gaps, share) for share in (0.5, 0.99))
    result.added_p50_ms, result.added_p99_ms = (1e3 * quantile(added, share) for share in (0.5, 0.99))


def _request(corpus: Corpus, job: FailoverJob, index: int) -> tuple[str, bytes]:
    """Return the question key of a request, and the request."""
    seed = job.seed * 1_000_003 + index
    question = wires.Question(seed, history=job.words, history_seed=seed)
    words, _ = corpus.prompt(question.words, seed)
    request = wires.request("chat", corpus, question, tokens=ANSWER_TOKENS, stream=True, key=job.key)
    return " ".join(map(str, words[-QUESTION_KEY_WORDS:])), request


async def _run_one(corpus: Corpus, port: int, request: bytes) -> tuple[Sequence[float], str | None]:
    """Return the arrival times of an answer, and its fault."""
    reader, arrivals = readers.ChatReader(), ArrivalClock()
    reader.clock = arrivals
    try:
        status = await http_client.request_once(port, request, reader.feed)
    except (ConnectionLostError, OSError) as error:
        return (), f"{type(error).__name__}: {error}"
    return arrivals.times, reader.fault(status, corpus.answer(ANSWER_TOKENS))


async def _fetch_times(port: int, variant: str) -> BackendTimes:
    """Return and clear the times of a backend, and set its kind of break."""
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
