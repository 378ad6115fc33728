"""Samples of a running gateway, and a verdict with a confidence interval: flat or growing.

The verdict uses only samples between rounds of traffic. Under load, memory depends on the number of simultaneous
requests, and with it on other processes of the machine.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.e2e.processes import holdings

BLOCKS = 12
# Student's t for a 95 % interval with BLOCKS - 2 degrees of freedom.
T_95 = 2.228
MAX_BYTES_PER_REQUEST = 60.0
MAX_EXTRA_DESCRIPTORS = 2
# Largest number of connections in the pool of a Redis store. It keeps one for each simultaneous operation.
STORE_CONNECTIONS = 64
# The default executor starts threads on demand, up to the number of cores and four.
MAX_EXTRA_THREADS = 6
# Allowed growth of the process while its allocations are flat. Causes are fragmentation and peaks of load.
MAX_PROCESS_GROWTH = 0.1
REPORT_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Sample:
    """Figures of the process at one time.

    Sizes are in bytes; `requests` is the number of completed requests. `allocated` is the memory in use of malloc and
    of Python's own allocator. `caches` is the size of the caches by class. Each is bounded, and is not yet full after
    the warm-up.
    """

    at_s: float
    requests: int
    rss: int
    pss: int
    uss: int
    allocated: int
    anonymous: int
    descriptors: int
    threads: int
    cpu_s: float
    tasks: int
    objects: int
    caches: Mapping[str, int]
    types: Mapping[str, int] = field(repr=False)

    @property
    def cached(self) -> int:
        return sum(self.caches.values())

    @property
    def uncached(self) -> int:
        return self.allocated - self.cached

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "types"}


async def take_sample(pid: int, report: Path, at_s: float, requests: int) -> Sample:
    """Read /proc, and let the process count its tasks and objects."""
    report.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR2)
    async with asyncio.timeout(REPORT_TIMEOUT_S):
        while not report.exists():
            await asyncio.sleep(0.02)
    inside = json.loads(report.read_text())
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    outside = holdings(pid)
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Sample(
        at_s=round(at_s, 1),
        requests=requests,
        rss=sizes["Rss"],
        pss=sizes["Pss"],
        uss=sizes["Private_Clean"] + sizes["Private_Dirty"],
        allocated=inside["allocated"],
        anonymous=outside.memory,
        descriptors=outside.descriptors,
        threads=outside.threads,
        cpu_s=(int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK"),
        tasks=inside["tasks"],
        objects=inside["objects"],
        caches=inside["cached"],
        types=inside["types"],
    )


@dataclass(frozen=True)
class Slope:
    """Growth per request with its 95 % confidence interval."""

    each: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.each:+.1f} per request, 95 % interval {self.low:+.1f} to {self.high:+.1f}"


def slope(samples: Sequence[Sample], name: str) -> Slope:
    """Return the least-squares slope over the means of blocks.

    Single samples depend on each other, so their confidence interval would be too narrow.
    """
    size = len(samples) / BLOCKS
    blocks = [samples[round(at * size) : round((at + 1) * size)] for at in range(BLOCKS)]
    x = [fmean(each.requests for each in block) for block in blocks]
    y = [fmean(float(getattr(each, name)) for each in block) for block in blocks]
    middle, mean = fmean(x), fmean(y)
    spread = sum((at - middle) ** 2 for at in x)
    each = sum((at - middle) * (value - mean) for at, value in zip(x, y, strict=True)) / spread
    rest = sum((value - mean - each * (at - middle)) ** 2 for at, value in zip(x, y, strict=True))
    error = T_95 * math.sqrt(rest / (BLOCKS - 2) / spread)
    return Slope(each, each - error, each + error)


@dataclass(frozen=True)
class Verdict:
    """Result of a soak test. `faults` are reasons to fail; `lines` is the report."""

    lines: Sequence[str]
    faults: Sequence[str]


def judge(samples: Sequence[Sample], baseline: Sample, store: str = "sqlite") -> Verdict:
    """Judge samples without load.

    `baseline` precedes the traffic. `samples` follow the rounds of traffic after the warm-up.
    """
    spare_descriptors = MAX_EXTRA_DESCRIPTORS + (STORE_CONNECTIONS if store == "redis" else 0)
    lines: list[str] = []
    faults: list[str] = []
    if len(samples) < 2 * BLOCKS:
        faults.append(f"only {len(samples)} samples after warm-up, {2 * BLOCKS} are needed: run for longer")
    else:
        slopes = {name: slope(samples, name) for name in ("uss", "allocated", "cached", "uncached", "objects")}
        lines += [f"{name}: {found}" for name, found in slopes.items()]
        memory = slopes["uncached"]
        if memory.low > MAX_BYTES_PER_REQUEST:
            faults.append(f"memory grows: {memory}")
        elif memory.high > MAX_BYTES_PER_REQUEST:
            faults.append(f"memory: {memory}; too few requests to call it flat, run for longer")
        quarter = len(samples) // 4
        first, last = (fmean(each.uss for each in part) for part in (samples[:quarter], samples[-quarter:]))
        lines.append(f"process: {first / 1e6:.1f} MB in the first quarter, {last / 1e6:.1f} MB in the last")
        if last > first * (1 + MAX_PROCESS_GROWTH):
            faults.append(f"the process grows: {first / 1e6:.1f} MB in the first quarter, {last / 1e6:.1f} in the last")
        lines += [f"{name}: {change:+d}" for name, change in _grown(samples)]
    end = samples[-1] if samples else baseline
    for name, spare in (("descriptors", spare_descriptors), ("threads", MAX_EXTRA_THREADS), ("tasks", 0)):
        before, after = getattr(baseline, name), getattr(end, name)
        lines.append(f"{name}: {before} before, {after} after")
        if after > before + spare:
            faults.append(f"{name} did not return to the baseline: {before} before, {after} after")
    return Verdict(lines, faults)


def _grown(samples: Sequence[Sample], count: int = 12) -> list[tuple[str, int]]:
    """Return the types whose number of objects grew most between the first and the last quarter."""
    quarter = max(len(samples) // 4, 1)

    def mean(part: Sequence[Sample], name: str) -> float:
        return fmean(each.types.get(name, 0) for each in part)

    names = {name for each in samples for name in each.types}
    changes = [(name, round(mean(samples[-quarter:], name) - mean(samples[:quarter], name))) for name in names]
    return sorted((each for each in changes if each[1] > 0), key=lambda each: -each[1])[:count]
