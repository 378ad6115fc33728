"""Command that runs storms one after the other, for as long as required.

python -m tests.chaos --seed 1 --count 50 --minutes 15
python -m tests.chaos --seed 17 --talk 4
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.chaos.rack import rack
from tests.chaos.storm import SLOTS, TALKS, storm
from tests.e2e.processes import MB, Holdings, holdings
from tests.mcp.conftest import start_upstream

# Warm-up time, until everything that a process keeps is loaded and the first gateways are freed; timers hold them for
# a minute.
WARM_S = 150.0
# Every storm builds a gateway; the memory that it leaves in the allocator varies by this much.
GROWTH_MB = 48


async def storms(first: int, count: int, minutes: float, talks: int, only: int | None) -> bool:
    """Run the storms, print their results and return whether all of them passed."""
    importlib.import_module("unisono.mcp.calls")
    wrong = 0
    base: Holdings | None = None
    deadline = time.monotonic() + minutes * 60
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unisono-chaos-")))
        _, upstream = stack.enter_context(start_upstream(folder))
        async with rack(folder, SLOTS) as backends:
            warm_at = time.monotonic() + WARM_S
            for seed in range(first, first + count):
                started = time.monotonic()
                weather = await storm(backends, upstream, seed, talks=talks, only=only)
                wrong += len(weather.failures)
                for failure in weather.failures:
                    print(f"FAILED, seed {seed}: {failure}", flush=True)
                gc.collect()
                now = holdings(os.getpid())
                print(
                    f"seed {seed}: {weather.talks} talks, {weather.fired} faults, {weather.failovers} failovers, "
                    f"{weather.again} retried by the client, "
                    f"{len(weather.failures)} wrong, canary p99 {weather.p99_s * 1000:.0f} ms, "
                    f"{time.monotonic() - started:.1f} s, {now.memory // MB} MB, {now.descriptors} descriptors",
                    flush=True,
                )
                base = now if base is None or started < warm_at else base
                if time.monotonic() > deadline:
                    break
            assert base is not None
            grown = (now.memory - base.memory) // MB
            print(f"{grown} MB and {now.descriptors - base.descriptors} descriptors more than after {WARM_S:g} seconds")
            steady = grown < GROWTH_MB and now.descriptors <= base.descriptors
    return not wrong and steady


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos ARGS=...")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first storm")
    parser.add_argument("--count", type=int, default=60, help="number of storms")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no further storm after this many minutes")
    parser.add_argument("--talks", type=int, default=TALKS, help="number of talks in one storm")
    parser.add_argument("--talk", type=int, help="run only the talk of this number, in one storm")
    options = parser.parse_args()
    count = 1 if options.talk is not None else options.count
    return 0 if asyncio.run(storms(options.seed, count, options.minutes, options.talks, options.talk)) else 1


if __name__ == "__main__":
    sys.exit(main())
