"""Rounds of mixed traffic for as long as needed, with samples of the gateway process and a verdict.

python -m tests.soak --minutes 120
python -m tests.soak --minutes 10 --rate 80 --store redis --trace 12
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos.talks import talk
from tests.soak.measure import MAX_EXTRA_DESCRIPTORS, Sample, judge, take_sample
from tests.soak.site import Site, site
from unisono.core.tasks import cancel_and_wait

ROUND_S = 180.0
"""Traffic between two samples without load."""
INTERVAL_S = 30.0
SNAPSHOT_INTERVAL_S = 90.0
"""With tracemalloc: a snapshot stops the gateway for seconds."""
CALM_S = 100.0
"""Time for idle connections and caches with a lifetime to end: the longest lifetime is a minute."""
WARM_UP_SHARE = 0.2
MIN_WARM_UP_S = 360.0
"""The shortest warm-up of a run that can pass: caches with a lifetime are full after it."""


async def idle_sample(here: Site, at_s: float, baseline: Sample | None = None) -> Sample:
    """The process without load; wait until descriptors and tasks are back at the baseline, give or take a pooled
    connection, or for CALM_S."""
    loop = asyncio.get_running_loop()
    until = loop.time() + CALM_S
    while True:
        found = await take_sample(here.replica.pid, here.report, at_s, here.traffic.done)
        if baseline is None or loop.time() > until:
            return found
        if found.descriptors <= baseline.descriptors + MAX_EXTRA_DESCRIPTORS and found.tasks <= baseline.tasks:
            return found
        await asyncio.sleep(1)


class Record:
    """The file of all samples, one line each. `kind` tells those taken under load from those taken without."""

    def __init__(self, here: Site, out: Path) -> None:
        self._here = here
        self._out = out
        self._lines = 0

    def add(self, found: Sample, kind: str) -> None:
        self._lines += 1
        with self._out.open("a") as file:
            file.write(json.dumps({"kind": kind} | found.to_dict()) + "\n")
        if (snapshot := self._here.report.with_suffix(".snapshot")).exists():
            shutil.move(snapshot, self._out.with_suffix(f".{self._lines}.snapshot"))
        self._here.forget()
        # Unlike a storm, a soak never asks for a talk again.
        talk.cache_clear()


async def sample_under_load(here: Site, record: Record, interval_s: float, began: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        at_s = asyncio.get_running_loop().time() - began
        record.add(await take_sample(here.replica.pid, here.report, at_s, here.traffic.done), "load")


async def rounds(here: Site, told: argparse.Namespace, baseline: Sample) -> list[Sample]:
    """Run the traffic, and return the samples taken behind each round."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    ends = began + told.minutes * 60
    record = Record(here, told.out)
    interval_s = SNAPSHOT_INTERVAL_S if told.trace else INTERVAL_S
    found: list[Sample] = []
    while loop.time() < ends:
        sampling = asyncio.create_task(sample_under_load(here, record, interval_s, began))
        await here.traffic.run(told.rate, min(loop.time() + ROUND_S, ends))
        await cancel_and_wait(sampling)
        found.append(await idle_sample(here, loop.time() - began, baseline))
        record.add(found[-1], "idle")
    return found


async def soak(told: argparse.Namespace, folder: Path) -> bool:
    """Run, report, and return whether memory, descriptors, threads and answers are as they should be."""
    told.out.parent.mkdir(parents=True, exist_ok=True)
    told.out.unlink(missing_ok=True)
    async with site(folder, told.store, trace=told.trace, seed=told.seed, cache_share=told.cache_share) as here:
        await here.traffic.each_once()
        await asyncio.sleep(min(CALM_S, told.minutes * 60) / 4)
        baseline = await idle_sample(here, 0.0)
        samples = await rounds(here, told, baseline)
        log = here.replica.log
        lost = here.lost.read_text().splitlines() if here.lost.exists() else []
    warm_up_s = told.warm_up * 60 if told.warm_up is not None else max(WARM_UP_SHARE * told.minutes * 60, MIN_WARM_UP_S)
    verdict = judge([each for each in samples if each.at_s >= warm_up_s], baseline, told.store)
    faults = [*verdict.faults, *here.traffic.failures, *lost[:20]]
    faults += [line for line in log.splitlines() if '"level":"error"' in line.replace(" ", "").lower()][:20]
    kinds = json.dumps(dict(sorted(here.traffic.kinds.items())))
    print(f"{here.traffic.done} requests in {told.minutes:g} minutes on {told.store}: {kinds}")
    print("\n".join(verdict.lines))
    print("\n".join(f"FAILED: {fault}" for fault in faults) or "flat", flush=True)
    return not faults


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak ARGS=...")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=12.0, help="requests started per second")
    parser.add_argument("--store", choices=("sqlite", "redis"), default="sqlite")
    parser.add_argument("--warm-up", type=float, help="minutes without a verdict; default a fifth, at least six")
    parser.add_argument("--trace", type=int, default=0, help="frames of tracemalloc; snapshots stand next to --out")
    parser.add_argument("--seed", type=int, default=1)
    # Caches of full size take longer than two hours to fill, and none of their eviction would be tested.
    parser.add_argument("--cache-share", type=float, default=1 / 16, help="size of the caches, as a share of the usual")
    parser.add_argument("--out", type=Path, default=Path(".cache/soak.jsonl"), help="one line per sample")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unisono-soak-") as folder:
        return 0 if asyncio.run(soak(told, Path(folder))) else 1


if __name__ == "__main__":
    sys.exit(main())
