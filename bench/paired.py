"""What stands behind and before a gateway with two backends that break off: both of them, and clients."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from bench import breaks
from bench.contenders import KEY
from bench.lines import answered
from bench.processes import Process, free_port
from bench.sample import Sample
from bench.tasks import Breaking


@dataclass(frozen=True, slots=True)
class Paired:
    """`models` are the ports of the two backends."""

    models: tuple[int, int]
    clients: Process

    def sample(self, port: int, breaking: Breaking, seed: int) -> Sample:
        """What the clients say of the gateway at `port`."""
        ask = breaks.Ask(
            how=breaking.how,
            port=port,
            models=self.models,
            key=KEY,
            streams=breaking.streams,
            requests=breaking.requests,
            words=breaking.words,
            seed=seed,
        )
        told = breaks.Told(**orjson.loads(answered(self.clients, asdict(ask))))
        return Sample(
            gap_p50_ms=told.gap_p50_ms,
            gap_p99_ms=told.gap_p99_ms,
            added_p50_ms=told.added_p50_ms,
            added_p99_ms=told.added_p99_ms,
            faults=told.faults,
            examples=tuple(told.examples),
        )


def start_paired(stack: ExitStack, folder: Path, stuff: Path, cpus: frozenset[int]) -> Paired:
    """All of it, ended with `stack`. Raises DidNotStart."""
    modules = [sys.executable, "-m"]
    ports = free_port(), free_port()
    for number, port in enumerate(ports):
        command = [*modules, "bench.break_model", str(port), str(stuff)]
        model = stack.enter_context(Process(f"breaking-{number}", command, folder, cpus))
        model.wait_ready(port, "/health")
    clients = Process("breaks", [*modules, "bench.breaks", str(stuff)], folder, cpus, piped=True)
    stack.enter_context(clients)
    return Paired(ports, clients)
