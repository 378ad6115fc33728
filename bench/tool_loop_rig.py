"""Processes for a gateway that runs tools: tool-calling backend, tool server, and clients."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.contenders import KEY
from bench.processes import Process, free_port
from bench.tasks import ToolLoopWork
from bench.tool_loop_load import ToolLoopJob


@dataclass(frozen=True, slots=True)
class ToolLoopRig:
    """Ports of the backend and of the tool server, their process ids, and the clients."""

    model: int
    tools: int
    clients: Process
    pids: tuple[int, int]

    def job(self, port: int, work: ToolLoopWork, seed: int) -> ToolLoopJob:
        """Return the clients' job for the gateway at `port`."""
        return ToolLoopJob(
            port=port,
            model=self.model,
            tools=self.tools,
            key=KEY,
            streams=work.streams,
            requests=work.requests,
            words=work.words,
            seed=seed,
        )


def start_tool_loop_rig(stack: ExitStack, folder: Path, corpus: Path, cpus: frozenset[int]) -> ToolLoopRig:
    """Start all processes; they end with `stack`. Raises StartError."""
    modules = [sys.executable, "-m"]
    model, tools = free_port(), free_port()
    model_process = Process("model", [*modules, "bench.calling_backend", str(model), str(corpus)], folder, cpus)
    stack.enter_context(model_process)
    tools_process = stack.enter_context(Process("tools", [*modules, "bench.tool_server", str(tools)], folder, cpus))
    clients = Process("tool_loop_load", [*modules, "bench.tool_loop_load", str(corpus)], folder, cpus, piped=True)
    stack.enter_context(clients)
    model_process.wait_ready(model, "/health")
    tools_process.wait_ready(tools, "")
    return ToolLoopRig(model, tools, clients, (model_process.pid, tools_process.pid))
