"""What every process that makes a load has in common: it is driven by lines of JSON, and counts what went wrong."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import orjson
import uvloop

MAX_EXAMPLES = 3
"""Faults that are told in words."""


@dataclass(slots=True)
class WorkerResult:
    """How long a load took, and its faults."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    """CPU of the load generator itself: near `seconds`, it was the limit."""
    faults: int = 0
    examples: list[str] = field(default_factory=list)

    def add_fault(self, message: str) -> None:
        self.faults += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(message)


def serve_lines(answer: Callable[[str], Coroutine[Any, Any, object]]) -> None:
    """Answer each line of stdin with one of JSON, all on one event loop, until there are no more."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin:
            print(orjson.dumps(runner.run(answer(line))).decode(), flush=True)
