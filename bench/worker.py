"""Common part of the worker processes: lines of JSON in and out, and counted faults."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import orjson
import uvloop

# Faults whose messages are reported.
MAX_EXAMPLES = 3


@dataclass(slots=True)
class WorkerResult:
    """Duration and faults of a job."""

    seconds: float = 0.0
    # CPU time of the load generator. If it is close to `seconds`, the generator was the limit.
    cpu_s: float = 0.0
    faults: int = 0
    examples: list[str] = field(default_factory=list)

    def add_fault(self, message: str) -> None:
        self.faults += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(message)


def serve_lines(answer: Callable[[str], Coroutine[Any, Any, object]]) -> None:
    """Answer each line of stdin with one line of JSON, on one event loop, until end of file."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin:
            print(orjson.dumps(runner.run(answer(line))).decode(), flush=True)
