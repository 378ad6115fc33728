"""Worker process that starts background responses and waits until their end is stored.

The worker reads one `BackgroundJob` per line of JSON and answers with one `BackgroundResult`. It reads the store
directly, without the gateway, to see when a response has ended. It reads only responses whose answer the backend has
sent completely, because each read is load on the store.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import orjson

from bench import http_client, prose, readers, vllm_wire, wires
from bench.http_client import ClientConnection, ConnectionLostError
from bench.load import quantile
from bench.prose import Answer, Corpus
from bench.worker import WorkerResult, serve_lines
from unisono.core.access import MASTER_TENANT
from unisono.core.state_store import StoredResponse
from unisono.store.redis import RedisStore

POLL_INTERVAL_S = 0.05
MAX_IDS_PER_READ = 50
# Deadline of one read. Long, because a busy store is judged by the time of its last log entry.
STORE_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class BackgroundJob:
    """Responses to start: `streams` of `tokens` tokens each, over `spread_s` seconds.

    `watched` of them are streamed to the client that starts them.
    """

    port: int
    upstream: int
    # Port of the Redis that the gateway logs to.
    store: int
    key: str
    streams: int
    watched: int
    tokens: int
    spread_s: float
    seed: int
    # Responses that have not ended by then count as one fault.
    limit_s: float = 120.0


@dataclass(slots=True)
class BackgroundResult(WorkerResult):
    """Delays after the last byte of the backend, in seconds.

    `logged` is the delay until the end is in the store, `watched` the delay until a streaming client receives it.
    """

    logged_p50_s: float = 0.0
    logged_max_s: float = 0.0
    watched_p50_s: float = 0.0
    watched_max_s: float = 0.0


class BackgroundClients:
    """Clients of one `BackgroundJob`; responses are identified by their question keys."""

    def __init__(self, corpus: Corpus, job: BackgroundJob, store: RedisStore) -> None:
        self._corpus, self._job, self._store = corpus, job, store
        self._result = BackgroundResult()
        self._ids: dict[str, str] = {}
        self._sent: dict[str, float] = {}
        self._logged: dict[str, float] = {}
        self._watched_ends: dict[str, float] = {}
        self._failed = 0

    async def run(self) -> BackgroundResult:
        job, result = self._job, self._result
        started_at, cpu = time.monotonic(), time.process_time()
        try:
            async with asyncio.timeout(job.limit_s), asyncio.TaskGroup() as group:
                group.create_task(self._watch_ends())
                for number in range(job.streams):
                    group.create_task(self._run_one(number))
        except TimeoutError:
            result.add_fault(f"{len(self._logged)} of {job.streams} responses logged after {job.limit_s:.0f} s")
        result.seconds, result.cpu_s = time.monotonic() - started_at, time.process_time() - cpu
        logged = [at - self._sent[question_key] for question_key, at in self._logged.items()]
        client_delays = [
            at - self._sent[question_key]
            for question_key, at in self._watched_ends.items()
            if question_key in self._sent
        ]
        result.logged_p50_s, result.logged_max_s = quantile(logged, 0.5), quantile(logged, 1.0)
        result.watched_p50_s, result.watched_max_s = quantile(client_delays, 0.5), quantile(client_delays, 1.0)
        return result

    async def _run_one(self, number: int) -> None:
        """Start one response, and read its stream if it is one of the watched ones."""
        job = self._job
        await asyncio.sleep(job.spread_s * number / job.streams)
        # The watched responses are distributed evenly over all.
        watched = number * job.watched // job.streams != (number + 1) * job.watched // job.streams
        seed = job.seed * 1_000_003 + number
        words, _ = self._corpus.prompt(wires.QUESTION_WORDS, seed)
        question_key = " ".join(map(str, words[-vllm_wire.QUESTION_KEY_WORDS :]))
        question = wires.Question(seed, extra_fields={"background": True})
        request = wires.request("responses", self._corpus, question, tokens=job.tokens, stream=watched, key=job.key)
        reader = WatchingReader(self._ids, question_key) if watched else CreatedReader(self._ids, question_key)
        try:
            status = await http_client.request_once(job.port, request, reader.feed)
            fault = reader.fault(status, self._corpus.answer(job.tokens))
        except (ConnectionLostError, OSError) as error:
            fault = f"{type(error).__name__}: {error}"
        if fault is not None:
            self._result.add_fault(fault)
            self._failed += question_key not in self._ids
        elif isinstance(reader, WatchingReader):
            self._watched_ends[question_key] = reader.ended_at

    async def _watch_ends(self) -> None:
        """Poll the store until every started response has ended."""
        job = self._job
        upstream = await http_client.connect(job.upstream)
        try:
            while len(self._logged) + self._failed < job.streams:
                await asyncio.sleep(POLL_INTERVAL_S)
                self._sent |= await _fetch_sent(upstream)
                unlogged = [
                    question_key
                    for question_key in self._sent
                    if question_key in self._ids and question_key not in self._logged
                ]
                for start in range(0, len(unlogged), MAX_IDS_PER_READ):
                    await self._read_store(unlogged[start : start + MAX_IDS_PER_READ])
        finally:
            upstream.close()

    async def _read_store(self, question_keys: list[str]) -> None:
        found = await self._store.responses(MASTER_TENANT, [self._ids[question_key] for question_key in question_keys])
        now = time.monotonic()
        expected = self._corpus.answer(self._job.tokens)
        for question_key, response in zip(question_keys, found, strict=True):
            if response is None or response.status.terminal:
                self._logged[question_key] = now
                if fault := _stored_fault(response, expected):
                    self._result.add_fault(fault)


class CreatedReader(readers.ResponseBodyReader):
    """Reader of the answer to a request for a background response."""

    def __init__(self, ids: dict[str, str], question_key: str) -> None:
        super().__init__()
        self._ids, self._question_key = ids, question_key

    def fault(self, status: int, expected: Answer) -> str | None:
        del expected  # The answer is stored later.
        if status != 200 or not self.id:
            return f"HTTP {status}: {self.body_start!r}"
        self._ids[self._question_key] = self.id
        return None


class WatchingReader(readers.ResponseStreamReader):
    """Reader of the events of a response; it records the id from the first event."""

    def __init__(self, ids: dict[str, str], question_key: str) -> None:
        super().__init__()
        self._ids, self._question_key = ids, question_key

    def on_created(self, response_id: str) -> None:
        self._ids[self._question_key] = response_id


def _stored_fault(response: StoredResponse | None, expected: Answer) -> str | None:
    if response is None:
        return "a response is missing in the store"
    fields = {"status": response.status.value, "output": [item.wire for item in response.output]}
    usage = {"output_tokens": response.usage.completion_tokens} if response.usage else None
    return readers.response_fault({**fields, "usage": usage}, expected)


async def _fetch_sent(upstream: ClientConnection) -> dict[str, float]:
    """Return the end times of the answers that the backend completed since the last call."""
    parts = list[bytes]()
    await upstream.request(http_client.message("/bench/ended", b""), parts.append)
    sent: dict[str, float] = orjson.loads(b"".join(parts))
    return sent


async def run(corpus: Corpus, job: BackgroundJob) -> BackgroundResult:
    store = RedisStore(f"redis://127.0.0.1:{job.store}/0", deadline_s=STORE_DEADLINE_S)
    try:
        return await BackgroundClients(corpus, job, store).run()
    finally:
        await store.aclose()


def main(path: Path) -> None:
    corpus = prose.load(path)
    serve_lines(lambda line: run(corpus, BackgroundJob(**orjson.loads(line))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
