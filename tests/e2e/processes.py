"""Resources of a running process, read from outside: memory, file descriptors and threads.

Linux has them in /proc. On other systems, `ps` lists the running processes and their parents.
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
    """Resources of a process.

    `memory` is its private memory in bytes, without shared and mapped memory.
    """

    memory: int
    descriptors: int
    threads: int


PROC = Path("/proc/self/stat").exists()


def children(pid: int) -> list[int]:
    """Return the running child processes."""
    if not PROC:
        return sorted(process for process, parent, _, _ in listed() if parent == pid)
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(child) for thread in threads for child in (thread / "children").read_text().split())


def listed() -> Iterator[tuple[int, int, str, str]]:
    """Yield every process with its parent, state and command line, as `ps` prints them."""
    columns = ["ps", "-A", "-o", "pid=,ppid=,stat=,command="]
    result = subprocess.run(columns, capture_output=True, text=True, check=True, timeout=30)
    for line in result.stdout.splitlines():
        process, parent, state, *command = line.split(None, 3)
        yield int(process), int(parent), state, "".join(command)


def lives(pid: int) -> bool:
    """Return whether the process runs; zombies do not."""
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
