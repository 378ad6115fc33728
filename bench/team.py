"""A gateway that a team shares: the key its clients send, with every kind of limit, and the monitor that watches it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.processes import Process, StartError, free_port

PROGRAM = Path(sys.executable).parent / "unisono"
LIMITS = {
    "--rpm": "10000000",
    "--tpm": "10000000000",
    "--max-parallel": "1000",
    "--token-budget": "100000000000",
    "--money-budget": "1000000",
    "--budget-period": "month",
}
"""None is ever reached: what is measured is that somebody looks."""
PRICE = """\
    unisono:
      price: {input: 0.10, output: 0.50, cached_input: 0.02}
"""


@dataclass(frozen=True, slots=True)
class Team:
    """What is on."""

    has_key: bool = False
    """Clients send a virtual key with limits and budgets; metrics are counted, and read once a second."""
    has_traces: bool = False
    """Every answer is recorded, and spans are exported."""


def sections(team: Team, metrics: int, spans: int) -> str:
    """What a gateway's configuration says of it. Metrics are read at the port `metrics`, spans taken at `spans`."""
    lines = ["unisono:", f"  traces: {{mode: '{'all' if team.has_traces else 'off'}'}}"]
    if team.has_key:
        lines += ["  metrics: true", f"  metrics_listen: 127.0.0.1:{metrics}"]
    else:
        lines += ["  metrics: false"]
    if team.has_traces:
        lines += [f"  otel: {{endpoint: 'http://127.0.0.1:{spans}/v1/traces'}}"]
    return "\n".join(lines) + "\n"


def issue_key(config: Path) -> str:
    """A virtual key of the gateway with this configuration. Raises DidNotStart."""
    limits = [word for option in LIMITS.items() for word in option]
    command = [str(PROGRAM), "keys", "create", "--config", str(config), *limits]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise StartError(f"no key was made:\n{completed.stderr[-2000:]}")
    return completed.stdout.strip()


def start_monitor(stack: ExitStack, metrics: int, folder: Path, cpus: frozenset[int]) -> int:
    """The port that takes spans; metrics are read at the port `metrics`. Raises DidNotStart."""
    port = free_port()
    command = [sys.executable, "-m", "bench.monitor", str(port), str(metrics)]
    process = stack.enter_context(Process(f"monitor-{port}", command, folder, cpus))
    process.wait_ready(port, "/seen")
    return port
