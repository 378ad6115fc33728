"""Time of queries on many request records, while others are written.

Run it with `python -m bench.request_records`.

`--records` sets their number, `--rate` the records written per second during the queries. Each query is repeated, and
the table has the median and the longest time in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from statistics import median

from bench.redis_server import start_redis
from unisono.core.request_counts import HOUR_S, MINUTE_S
from unisono.core.request_filter import RequestFilter
from unisono.core.request_record import RequestRecord
from unisono.core.state_store import Store
from unisono.store import open_store

REPETITIONS = 20
BATCH = 500
DAY_S = 86_400.0
QUERIES = {
    "latest": RequestFilter(),
    "one key of 200": RequestFilter(key="key_7"),
    "one key and model": RequestFilter(key="key_7", model="model_1"),
    "failed": RequestFilter(failed=True),
    "failed of one key": RequestFilter(key="key_7", failed=True),
    "recovery and model": RequestFilter(recovery="moved", model="model_2"),
    "no match": RequestFilter(key="key_7", tenant="team_8"),
}


def record(number: int, at: float, draw: random.Random) -> RequestRecord:
    key = draw.randrange(200)
    has_failed = draw.random() < 0.02
    return RequestRecord(
        id=f"req_{number:032x}",
        at=at,
        duration_s=draw.expovariate(0.5),
        method="POST",
        route="/v1/chat/completions",
        status=500 if has_failed else 200,
        error="backend_error" if has_failed else "",
        tenant=f"team_{key % 20}",
        key=f"key_{key}",
        key_name=f"name of {key}",
        user=f"user_{draw.randrange(5000)}",
        model=f"model_{draw.randrange(4)}",
        served_model="gpt-oss",
        deployment=f"vllm-{draw.randrange(8)}",
        attempts=(("vllm-1", ""),),
        input_tokens=draw.randrange(10_000),
        output_tokens=draw.randrange(1000),
        first_token_s=draw.expovariate(4),
        finish="stop",
        recoveries=("moved",) if draw.random() < 0.01 else (),
        cost=draw.randrange(10_000),
    )


async def fill(store: Store, count: int, draw: random.Random) -> float:
    """Store records that end within the last day; return the seconds that it took."""
    began_s, start = time.monotonic(), time.time() - DAY_S
    for first in range(0, count, BATCH):
        records = [record(number, start + DAY_S * number / count, draw) for number in range(first, first + BATCH)]
        await store.keep_requests(*records, for_s=30 * DAY_S, most=2 * count)
    return time.monotonic() - began_s


async def write(store: Store, count: int, rate: int, draw: random.Random) -> None:
    """Write records at this rate until cancelled."""
    number = count
    while True:
        due_s = time.monotonic() + 0.25
        records = [record(number + each, time.time(), draw) for each in range(rate // 4)]
        number += len(records)
        await store.keep_requests(*records, for_s=30 * DAY_S, most=2 * count)
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))


async def times_of(store: Store) -> AsyncIterator[tuple[str, list[float]]]:
    for name, wanted in QUERIES.items():
        times = []
        for _ in range(REPETITIONS):
            began_s = time.perf_counter()
            await store.requests(wanted, 50)
            times.append(time.perf_counter() - began_s)
        yield name, times
    now = time.time()
    ranges = (("counts of an hour", 3600.0, MINUTE_S), ("counts of a day", DAY_S, HOUR_S))
    for name, range_s, step_s in ranges:
        times = []
        for _ in range(REPETITIONS):
            began_s = time.perf_counter()
            await store.request_counts(RequestFilter(since=now - range_s, until=now), step_s)
            times.append(time.perf_counter() - began_s)
        yield name, times


@asynccontextmanager
async def opened(address: str) -> AsyncIterator[Store]:
    store = open_store(address, deadline_s=5.0)
    await store.start()
    try:
        yield store
    finally:
        await store.aclose()


async def measure(name: str, address: str, count: int, rate: int) -> None:
    draw = random.Random(1)
    async with opened(address) as store:
        filled_s = await fill(store, count, draw)
        print(f"\n{name}: {count} records, {count / filled_s:,.0f} per second while filling", flush=True)
        print("| query | median (ms) | longest (ms) |\n|---|---|---|", flush=True)
        writing = asyncio.create_task(write(store, count, rate, draw))
        async for query, times in times_of(store):
            print(f"| {query} | {1000 * median(times):.1f} | {1000 * max(times):.1f} |", flush=True)
        writing.cancel()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rate", type=int, default=500)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        asyncio.run(measure("SQLite", f"sqlite:///{folder}/state.db", options.records, options.rate))
        port, _ = start_redis(stack, Path(folder), frozenset(os.sched_getaffinity(0)))
        asyncio.run(measure("Redis", f"redis://127.0.0.1:{port}", options.records, options.rate))
    return 0


if __name__ == "__main__":
    sys.exit(main())
