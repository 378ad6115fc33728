"""What a running process holds, read from outside: memory, descriptors, threads."""

from __future__ import annotations

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


def children(pid: int) -> list[int]:
    """The processes it started that are there still."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(child) for thread in threads for child in (thread / "children").read_text().split())


def lives(pid: int) -> bool:
    """Whether it does anything yet: one that ended and nobody asked about does not."""
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
