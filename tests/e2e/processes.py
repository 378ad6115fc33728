"""What a running process holds, read from outside: memory, descriptors, threads.

Linux tells all of it below /proc. Of other systems `ps` is asked, which knows who lives and whose child it is.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KB = 1024
MB = 1024 * KB


@dataclass(frozen=True)
class Holdings:
    """`memory` is in bytes: what the process has for itself alone, whatever it shares or has mapped."""

    memory: int
    descriptors: int
    threads: int


PROC = Path("/proc/self/stat").exists()


def children(pid: int) -> list[int]:
    """The processes it started that are there still."""
    if not PROC:
        return sorted(process for process, parent, _, _ in listed() if parent == pid)
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(child) for thread in threads for child in (thread / "children").read_text().split())


def listed() -> Iterator[tuple[int, int, str, str]]:
    """Every process there is, with its parent, its state and its command line, as `ps` tells them."""
    columns = ["ps", "-A", "-o", "pid=,ppid=,stat=,command="]
    told = subprocess.run(columns, capture_output=True, text=True, check=True, timeout=30)
    for line in told.stdout.splitlines():
        process, parent, state, *command = line.split(None, 3)
        yield int(process), int(parent), state, "".join(command)


def lives(pid: int) -> bool:
    """Whether it does anything yet: one that ended and nobody asked about does not."""
    if not PROC:
        return any(process == pid and state[0] not in "ZX" for process, _, state, _ in listed())
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def holdings(pid: int) -> Holdings:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Holdings(
        memory=int(status["RssAnon"].split()[0]) * 1024,
        descriptors=sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        threads=int(status["Threads"]),
    )
