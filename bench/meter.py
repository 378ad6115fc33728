"""CPU time and memory of a process and its children, read from the kernel.

The process under test runs no additional code.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

PROC = Path("/proc")
LINUX = (PROC / "self" / "stat").exists()
TICK = os.sysconf("SC_CLK_TCK")


def process_tree(pid: int) -> list[int]:
    """Return `pid` and all its living descendants."""
    if LINUX:
        found = [pid]
        for parent in found:
            for listing in (PROC / str(parent) / "task").glob("*/children"):
                found.extend(int(child) for child in listing.read_text().split())
        return found
    pairs = [line.split() for line in _ps("-axo", "pid=,ppid=").splitlines()]
    found = [pid]
    for parent in found:
        found.extend(int(child) for child, ppid in pairs if int(ppid) == parent)
    return found


def cpu_seconds(pid: int) -> float:
    """Return user and system time of `pid`, its living descendants and its reaped children."""
    return sum(_cpu_of(member) for member in process_tree(pid))


def resident_mib(pid: int) -> float:
    """Return the resident memory of `pid` and its living descendants.

    Shared pages count once per process.
    """
    if LINUX:
        page = os.sysconf("SC_PAGE_SIZE")
        return sum(int((PROC / str(m) / "statm").read_text().split()[1]) * page for m in process_tree(pid)) / 2**20
    return sum(int(_ps("-o", "rss=", "-p", str(member))) for member in process_tree(pid)) / 1024


def _cpu_of(pid: int) -> float:
    if LINUX:
        # The process clock counts nanoseconds, utime and stime only ticks. Its id is derived from the pid (see
        # clock_getcpuclockid(3)). The ticks alone include reaped children.
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime((~pid << 3) | 2) + (int(fields[13]) + int(fields[14])) / TICK
    return seconds_of(_ps("-o", "time=", "-p", str(pid)))


def seconds_of(ps_time: str) -> float:
    """Parse the `[[dd-]hh:]mm:ss.cc` of ps into seconds."""
    days, _, rest = ps_time.strip().rpartition("-")
    total = 0.0
    for part in rest.split(":"):
        total = total * 60 + float(part)
    return total + 86_400 * int(days or 0)


def _ps(*arguments: str) -> str:
    return subprocess.run(["ps", *arguments], capture_output=True, text=True, check=True).stdout
