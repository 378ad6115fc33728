"""How a run talks to the processes that make its loads: one line of JSON out, one in."""

from __future__ import annotations

import select

import orjson

from bench import meter
from bench.processes import Process

WEIGH_EVERY_S = 0.2


def weighed(process: Process, question: object, pid: int) -> tuple[bytes, float]:
    """The line `process` answers, and by how many MiB the process `pid` grew meanwhile, at most."""
    most = before = meter.resident_mib(pid)
    _ask(process, question)
    while not select.select([process.pipes[1]], [], [], WEIGH_EVERY_S)[0]:
        most = max(most, meter.resident_mib(pid))
    return _answer(process), most - before


def answered(process: Process, question: object) -> bytes:
    """The line `process` answers to a line of JSON."""
    _ask(process, question)
    return _answer(process)


def _ask(process: Process, question: object) -> None:
    asked = process.pipes[0]
    asked.write(orjson.dumps(question) + b"\n")
    asked.flush()


def _answer(process: Process) -> bytes:
    answer = process.pipes[1]
    line = answer.readline()
    if not line:
        raise RuntimeError(f"{process.name} ended:\n{process.log_end()}")
    return line
