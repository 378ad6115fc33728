"""Processes for a gateway with two backends that break off: the backends and the clients."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from bench import failover_load
from bench.contenders import KEY
from bench.processes import Process, free_port
from bench.sample import Sample
from bench.tasks import FailoverWork
from bench.worker_client import ask_worker


@dataclass(frozen=True, slots=True)
class FailoverRig:
    """Ports of the two backends, and the worker process with the clients."""

    backend_ports: tuple[int, int]
    clients: Process

    def sample(self, port: int, work: FailoverWork, seed: int) -> Sample:
        """Measure the gateway at `port`."""
        job = failover_load.FailoverJob(
            variant=work.variant,
            port=port,
            backend_ports=self.backend_ports,
            key=KEY,
            streams=work.streams,
            requests=work.requests,
            words=work.words,
            seed=seed,
        )
        result = failover_load.FailoverResult(**orjson.loads(ask_worker(self.clients, asdict(job))))
        return Sample(
            gap_p50_ms=result.gap_p50_ms,
            gap_p99_ms=result.gap_p99_ms,
            added_p50_ms=result.added_p50_ms,
            added_p99_ms=result.added_p99_ms,
            faults=result.faults,
            examples=tuple(result.examples),
        )


def start_failover_rig(stack: ExitStack, folder: Path, corpus: Path, cpus: frozenset[int]) -> FailoverRig:
    """Start all processes; they end with `stack`. Raises StartError."""
    modules = [sys.executable, "-m"]
    ports = free_port(), free_port()
    for number, port in enumerate(ports):
        command = [*modules, "bench.breaking_backend", str(port), str(corpus)]
        backend = stack.enter_context(Process(f"breaking-{number}", command, folder, cpus))
        backend.wait_ready(port, "/health")
    clients = Process("failover_load", [*modules, "bench.failover_load", str(corpus)], folder, cpus, piped=True)
    stack.enter_context(clients)
    return FailoverRig(ports, clients)
