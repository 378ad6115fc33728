"""Soak test: rounds of mixed traffic, samples of the gateway process, and a verdict.

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

# Duration of the traffic between two samples without load.
ROUND_S = 180.0
INTERVAL_S = 30.0
# Interval with tracemalloc: a snapshot stops the gateway for seconds.
SNAPSHOT_INTERVAL_S = 90.0
# Time in which idle connections and cached entries expire: the longest lifetime is a minute.
CALM_S = 100.0
WARM_UP_SHARE = 0.2
# The shortest warm-up of a run that can pass: caches with a lifetime are full after it.
MIN_WARM_UP_S = 360.0


async def idle_sample(site_under_test: Site, at_s: float, baseline: Sample | None = None) -> Sample:
    """Sample the process without load.

    Wait until descriptors and tasks are back at the baseline, apart from pooled connections, but for CALM_S at most.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + CALM_S
    while True:
        sample = await take_sample(
            site_under_test.replica.pid, site_under_test.report, at_s, site_under_test.traffic.done
        )
        if baseline is None or loop.time() > until:
            return sample
        if sample.descriptors <= baseline.descriptors + MAX_EXTRA_DESCRIPTORS and sample.tasks <= baseline.tasks:
            return sample
        await asyncio.sleep(1)


class Record:
    """File with one line per sample. Its `kind` is `load` or `idle`."""

    def __init__(self, site_under_test: Site, out: Path) -> None:
        self._site = site_under_test
        self._out = out
        self._lines = 0

    def add(self, sample: Sample, kind: str) -> None:
        self._lines += 1
        with self._out.open("a") as file:
            file.write(json.dumps({"kind": kind} | sample.to_dict()) + "\n")
        if (snapshot := self._site.report.with_suffix(".snapshot")).exists():
            shutil.move(snapshot, self._out.with_suffix(f".{self._lines}.snapshot"))
        self._site.forget()
        # Unlike a storm, a soak never asks for a talk again.
        talk.cache_clear()


async def sample_under_load(site_under_test: Site, record: Record, interval_s: float, began: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        at_s = asyncio.get_running_loop().time() - began
        record.add(
            await take_sample(site_under_test.replica.pid, site_under_test.report, at_s, site_under_test.traffic.done),
            "load",
        )


async def rounds(site_under_test: Site, options: argparse.Namespace, baseline: Sample) -> list[Sample]:
    """Run the traffic, and return the samples that are taken after each round."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    ends = began + options.minutes * 60
    record = Record(site_under_test, options.out)
    interval_s = SNAPSHOT_INTERVAL_S if options.trace else INTERVAL_S
    found: list[Sample] = []
    while loop.time() < ends:
        sampling = asyncio.create_task(sample_under_load(site_under_test, record, interval_s, began))
        await site_under_test.traffic.run(options.rate, min(loop.time() + ROUND_S, ends))
        await cancel_and_wait(sampling)
        found.append(await idle_sample(site_under_test, loop.time() - began, baseline))
        record.add(found[-1], "idle")
    return found


async def soak(options: argparse.Namespace, folder: Path) -> bool:
    """Run the soak test and print its report. Return True if it found no fault."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.unlink(missing_ok=True)
    async with site(
        folder, options.store, trace=options.trace, seed=options.seed, cache_share=options.cache_share
    ) as site_under_test:
        await site_under_test.traffic.each_once()
        await asyncio.sleep(min(CALM_S, options.minutes * 60) / 4)
        baseline = await idle_sample(site_under_test, 0.0)
        samples = await rounds(site_under_test, options, baseline)
        log = site_under_test.replica.log
        lost = site_under_test.lost.read_text().splitlines() if site_under_test.lost.exists() else []
    warm_up_s = (
        options.warm_up * 60
        if options.warm_up is not None
        else max(WARM_UP_SHARE * options.minutes * 60, MIN_WARM_UP_S)
    )
    verdict = judge([each for each in samples if each.at_s >= warm_up_s], baseline, options.store)
    faults = [*verdict.faults, *site_under_test.traffic.failures, *lost[:20]]
    faults += [line for line in log.splitlines() if '"level":"error"' in line.replace(" ", "").lower()][:20]
    kinds = json.dumps(dict(sorted(site_under_test.traffic.kinds.items())))
    print(f"{site_under_test.traffic.done} requests in {options.minutes:g} minutes on {options.store}: {kinds}")
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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unisono-soak-") as folder:
        return 0 if asyncio.run(soak(options, Path(folder))) else 1


if __name__ == "__main__":
    sys.exit(main())
