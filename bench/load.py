"""Worker process with concurrent clients that repeat requests after complete answers.

The worker reads lines of JSON. It answers a `Load` with a `LoadResult`, and a `PriorTurnsJob` with the body fields that
continue its turns. Connections stay open between lines, so that a warm-up opens those of the next line.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from bench import http_client, prose, readers, wires
from bench.http_client import ClientConnection, ConnectionLostError
from bench.prior_turns import PriorTurnsJob, create_prior_turns
from bench.prose import Corpus
from bench.worker import WorkerResult, serve_lines

NO_FIELDS: Mapping[str, object] = {}


@dataclass(frozen=True, slots=True)
class ColdPrompts:
    """Long prompts next to the streams: one of `words` tokens every `every_s` seconds."""

    words: int
    every_s: float
    count: int
    tokens: int = 16


@dataclass(frozen=True, slots=True)
class Load:
    """Load of `streams` clients with `requests` answers of `tokens` tokens each.

    The clients start over `spread_s` seconds.
    """

    wire: str
    port: int
    streams: int
    tokens: int
    requests: int = 1
    stream: bool = True
    spread_s: float = 0.0
    seed: int = 0
    # Words of the conversation before each question: one for all, or with `fresh` a new one for each.
    history: int = 0
    fresh: bool = False
    # Seconds after which each client disconnects from its answer; 0 for never.
    disconnect_after_s: float = 0.0
    cold: ColdPrompts | None = None
    # Body fields with the stored state that requests continue. Each entry serves an equal number of consecutive
    # requests.
    priors: tuple[Mapping[str, str], ...] = ()
    key: str = ""
    # The load is cancelled after this time, which counts as a fault.
    limit_s: float = 120.0


@dataclass(slots=True)
class LoadResult(WorkerResult):
    """Totals and latencies of a load; gaps include only the streams, not the cold prompts."""

    requests: int = 0
    tokens: int = 0
    ttft_p50_ms: float = 0.0
    ttft_p99_ms: float = 0.0
    gap_p50_ms: float = 0.0
    gap_p99_ms: float = 0.0
    gap_max_ms: float = 0.0
    # Requests whose client disconnected before the end of the answer.
    disconnected: int = 0


def quantile(values: list[float], share: float) -> float:
    """Return the value that `share` of the values do not exceed, or 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


class Clients:
    """Streams of a load, and the open connections by port."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self._idle: dict[int, list[ClientConnection]] = {}

    async def run(self, load: Load) -> LoadResult:
        result, ttfts, gaps = LoadResult(), list[float](), list[float]()
        count = load.streams * load.requests
        priors = [load.priors[i * len(load.priors) // count] if load.priors else {} for i in range(count)]
        requests = [
            self._request(load, wires.QUESTION_WORDS, i, load.tokens, load.history, priors[i]) for i in range(count)
        ]
        cold = load.cold
        cold_requests = list[bytes]()
        if cold is not None:
            cold_requests += [self._request(load, cold.words, count + i, cold.tokens) for i in range(cold.count)]

        async def client(index: int) -> None:
            await asyncio.sleep(load.spread_s * index / load.streams)
            for request in requests[index :: load.streams]:
                clock = await self._send(load, request, load.tokens, result)
                if clock is not None and clock.first is not None:
                    ttfts.append(clock.first - clock.sent)
                    gaps.extend(clock.gaps)

        async def cold_client(index: int, every_s: float, tokens: int) -> None:
            await asyncio.sleep((index + 1) * every_s)
            await self._send(load, cold_requests[index], tokens, result)

        started_at, cpu = time.perf_counter(), time.process_time()
        try:
            async with asyncio.timeout(load.limit_s), asyncio.TaskGroup() as group:
                for i in range(load.streams):
                    group.create_task(client(i))
                for i in range(len(cold_requests)):
                    if cold is not None:
                        group.create_task(cold_client(i, cold.every_s, cold.tokens))
        except TimeoutError:
            self._record(result, 0, f"not finished after {load.limit_s:.0f} s")
        result.seconds, result.cpu_s = time.perf_counter() - started_at, time.process_time() - cpu
        result.ttft_p50_ms, result.ttft_p99_ms = (1e3 * quantile(ttfts, q) for q in (0.5, 0.99))
        result.gap_p50_ms, result.gap_p99_ms, result.gap_max_ms = (1e3 * quantile(gaps, q) for q in (0.5, 0.99, 1.0))
        return result

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()

    def _request(
        self,
        load: Load,
        words: int,
        index: int,
        tokens: int,
        history: int = 0,
        extra_fields: Mapping[str, object] = NO_FIELDS,
    ) -> bytes:
        seed = load.seed * 1_000_003 + index
        question = wires.Question(seed, words, history, seed if load.fresh else 0, extra_fields)
        return wires.request(load.wire, self.corpus, question, tokens=tokens, stream=load.stream, key=load.key)

    async def _send(self, load: Load, request: bytes, tokens: int, result: LoadResult) -> readers.Clock | None:
        expected = self.corpus.answer(tokens)
        idle = self._idle.setdefault(load.port, [])
        connection: ClientConnection | None = None
        reader = None
        try:
            connection = _usable(idle) or await http_client.connect(load.port)
            reader = wires.reader(load.wire, stream=load.stream)
            async with asyncio.timeout(load.disconnect_after_s or None):
                status = await connection.request(request, reader.feed)
            fault = reader.fault(status, expected)
        except TimeoutError:
            result.requests += 1
            result.disconnected += 1
            return None
        except (ConnectionLostError, OSError) as error:
            fault = f"{type(error).__name__}: {error}"
        finally:
            if connection is not None and connection.reusable:
                idle.append(connection)
            elif connection is not None:
                connection.close()
        self._record(result, tokens, fault)
        return None if fault or reader is None else reader.clock

    @staticmethod
    def _record(result: LoadResult, tokens: int, fault: str | None) -> None:
        result.requests += 1
        result.tokens += tokens
        if fault is not None:
            result.add_fault(fault)


def _usable(idle: list[ClientConnection]) -> ClientConnection | None:
    """Return the latest connection that the server has not closed, if there is one."""
    while idle:
        connection = idle.pop()
        if connection.reusable:
            return connection
    return None


def parse(line: bytes | str) -> Load | PriorTurnsJob:
    body = orjson.loads(line)
    if "turns" in body:
        return PriorTurnsJob(**body)
    cold = body.pop("cold", None)
    priors = tuple(body.pop("priors", ()))
    return Load(**body, cold=None if cold is None else ColdPrompts(**cold), priors=priors)


def main(path: Path) -> None:
    clients = Clients(prose.load(path))

    async def answer(line: str) -> object:
        match parse(line):
            case PriorTurnsJob() as job:
                return await create_prior_turns(clients.corpus, job)
            case Load() as load:
                return await clients.run(load)

    serve_lines(answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
