"""Features of a gateway that a team shares: virtual key with limits, metrics, spans."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.processes import Process, StartError, free_port

PROGRAM = Path(sys.executable).parent / "unisono"
# No load reaches these limits. The measurement is the cost of the checks.
LIMITS = {
    "--rpm": "10000000",
    "--tpm": "10000000000",
    "--max-parallel": "1000",
    "--token-budget": "100000000000",
    "--money-budget": "1000000",
    "--budget-period": "month",
}
PRICE = """\
    unisono:
      price: {input: 0.10, output: 0.50, cached_input: 0.02}
"""


@dataclass(frozen=True, slots=True)
class Team:
    """Enabled features."""

    # Clients send a virtual key with limits and budgets. Metrics are counted, and read every second.
    has_key: bool = False
    # Every answer is recorded, and spans are exported.
    has_traces: bool = False


def sections(team: Team, metrics: int, spans: int) -> str:
    """Return the configuration of the features, with the ports for metrics and span export."""
    lines = ["unisono:", f"  traces: {{mode: '{'all' if team.has_traces else 'off'}'}}"]
    if team.has_key:
        lines += ["  metrics: true", f"  metrics_listen: 127.0.0.1:{metrics}"]
    else:
        lines += ["  metrics: false"]
    if team.has_traces:
        lines += [f"  otel: {{endpoint: 'http://127.0.0.1:{spans}/v1/traces'}}"]
    return "\n".join(lines) + "\n"


def issue_key(config: Path) -> str:
    """Create a virtual key on the gateway with this configuration. Raises StartError."""
    limits = [word for option in LIMITS.items() for word in option]
    command = [str(PROGRAM), "keys", "create", "--config", str(config), *limits]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise StartError(f"creation of a key failed:\n{completed.stderr[-2000:]}")
    return completed.stdout.strip()


def start_monitor(stack: ExitStack, metrics: int, folder: Path, cpus: frozenset[int]) -> int:
    """Start a monitor that reads metrics at the port `metrics`, and return its port.

    Raises StartError.
    """
    port = free_port()
    command = [sys.executable, "-m", "bench.monitor", str(port), str(metrics)]
    process = stack.enter_context(Process(f"monitor-{port}", command, folder, cpus))
    process.wait_ready(port, "/seen")
    return port
