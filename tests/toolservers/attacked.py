"""Server process under attack.

It runs programs from standard input in the Python tool and prints their outcomes. It needs only the standard library,
so that the system interpreter can run it as any user.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from unisono.toolservers.python.executor import MIB, CodeRunner, RunLimits, RunOutcome
from unisono.toolservers.python.sandbox_probe import close_to_inspection, find_sandbox, make_sandbox

# Exists in the memory of this process only, not in any file.
CANARY = "-".join(["memory", "canary", "0000"])
LIMITS = RunLimits(seconds=20.0, memory=256 * MIB, disk=64 * MIB)


async def _sandboxed(programs: dict[str, str], is_isolated: bool, drops: bool) -> dict[str, Any]:
    way = make_sandbox(sys.executable, drops=drops, is_isolated=is_isolated)
    runner = CodeRunner(way, LIMITS, at_once=2)
    outcomes: dict[str, Any] = {}

    async def run(name: str, code: str) -> None:
        outcome: RunOutcome = await runner.run(code)
        outcomes[name] = asdict(outcome)

    for name, code in programs.items():
        await run(name, code)
    return outcomes


def _bare(programs: dict[str, str]) -> dict[str, Any]:
    """Run the same programs as ordinary child processes, as a control."""
    outcomes = {}
    for name, code in programs.items():
        completed = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        outcomes[name] = {"logs": completed.stdout + completed.stderr}
    return outcomes


def main() -> None:
    mode = sys.argv[1]
    if mode == "find":
        print(find_sandbox().described)
        return
    if mode == "bare":
        print("ready", flush=True)
        found = _bare(json.loads(sys.stdin.readline()))
    else:
        close_to_inspection()
        print("ready", flush=True)
        programs = json.loads(sys.stdin.readline())
        found = asyncio.run(_sandboxed(programs, mode == "isolated", sys.argv[2] == "drops"))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
