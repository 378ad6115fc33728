"""What stands behind and before a gateway that runs tools: a model that calls them, their server, and clients."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.contenders import KEY
from bench.loops import Ask
from bench.processes import Process, free_port
from bench.tasks import Looping


@dataclass(frozen=True, slots=True)
class Tooled:
    """`model` and `tools` are ports, `pids` those of the two processes there."""

    model: int
    tools: int
    clients: Process
    pids: tuple[int, int]

    def ask(self, port: int, looping: Looping, seed: int) -> Ask:
        """What the clients are told about the gateway at `port`."""
        return Ask(
            port=port,
            model=self.model,
            tools=self.tools,
            key=KEY,
            streams=looping.streams,
            requests=looping.requests,
            words=looping.words,
            seed=seed,
        )


def start_tooled(stack: ExitStack, folder: Path, stuff: Path, cpus: frozenset[int]) -> Tooled:
    """All of it, ended with `stack`. Raises DidNotStart."""
    modules = [sys.executable, "-m"]
    model, tools = free_port(), free_port()
    called = Process("model", [*modules, "bench.tool_model", str(model), str(stuff)], folder, cpus)
    stack.enter_context(called)
    server = stack.enter_context(Process("tools", [*modules, "bench.tool_server", str(tools)], folder, cpus))
    clients = Process("loops", [*modules, "bench.loops", str(stuff)], folder, cpus, piped=True)
    stack.enter_context(clients)
    called.wait_ready(model, "/health")
    server.wait_ready(tools, "")
    return Tooled(model, tools, clients, (called.pid, server.pid))
