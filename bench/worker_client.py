"""Client of the worker processes: writes one line of JSON and reads one."""

from __future__ import annotations

import select

import orjson

from bench import meter
from bench.processes import Process

MEMORY_POLL_S = 0.2


def ask_and_measure_growth(process: Process, job: object, pid: int) -> tuple[bytes, float]:
    """Return the answer of `process`, and the peak memory growth of `pid` in MiB."""
    peak = before = meter.resident_mib(pid)
    _write_line(process, job)
    while not select.select([process.pipes[1]], [], [], MEMORY_POLL_S)[0]:
        peak = max(peak, meter.resident_mib(pid))
    return _read_line(process), peak - before


def ask_worker(process: Process, job: object) -> bytes:
    """Write one line of JSON to `process` and return its answer."""
    _write_line(process, job)
    return _read_line(process)


def _write_line(process: Process, job: object) -> None:
    stdin = process.pipes[0]
    stdin.write(orjson.dumps(job) + b"\n")
    stdin.flush()


def _read_line(process: Process) -> bytes:
    stdout = process.pipes[1]
    line = stdout.readline()
    if not line:
        raise RuntimeError(f"{process.name} ended:\n{process.log_tail()}")
    return line
