"""What stands behind and before a gateway that runs tools: a model that calls them, their server, and clients."""

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
    """`model` and `tools` are ports, `pids` those of the two processes there."""

    model: int
    tools: int
    clients: Process
    pids: tuple[int, int]

    def job(self, port: int, work: ToolLoopWork, seed: int) -> ToolLoopJob:
        """What the clients are told about the gateway at `port`."""
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
    """All of it, ended with `stack`. Raises DidNotStart."""
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
