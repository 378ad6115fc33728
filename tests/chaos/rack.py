"""Backends of a storm and their proxies.

Each backend is one process, which is killed, stopped and restarted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.backend import LOST
from tests.chaos.proxy import Fault, Proxy

ROOT = Path(__file__).parents[2]
# Time before a killed process is restarted.
DOWN_S = 0.3


@dataclass
class Slot:
    """One process.

    Its pid and port change when it is killed and restarted. `down` is set while it does not run.
    """

    kind: str
    pid: int = 0
    port: int = 0
    down: bool = False


@dataclass
class Rack:
    """Running backends. The key of `slots` is the kind, with a number if there are several."""

    folder: Path
    process: asyncio.subprocess.Process
    slots: dict[str, Slot] = field(default_factory=dict)
    grips: int = 0
    # Time before a stopped process continues; longer than every token timeout.
    stopped_s: float = 6.0
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tending: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self, slot: Slot) -> None:
        async with self._starting:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.write(f"{slot.kind}\n".encode())
            async with asyncio.timeout(60):
                fields = (await self.process.stdout.readline()).split()
        slot.pid, slot.port, slot.down = int(fields[0]), int(fields[1]), False

    def grip(self, name: str, how: str) -> None:
        """Kill a process (`kill`) or stop it (`stop`), unless another one is down.

        Only one process is down at a time, so that others can take over.
        """
        slot = self.slots[name]
        if self.short:
            return
        self.grips += 1
        slot.down = True
        os.kill(slot.pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        task = asyncio.get_running_loop().create_task(self._put_back(slot, how))
        self._tending.add(task)
        task.add_done_callback(self._tending.discard)

    @property
    def short(self) -> int:
        """Number of processes that are down."""
        return sum(slot.down for slot in self.slots.values())

    async def settled(self) -> None:
        """Wait until every killed or stopped process runs again."""
        await asyncio.gather(*self._tending)

    async def _put_back(self, slot: Slot, how: str) -> None:
        if how == "kill":
            await asyncio.sleep(DOWN_S)
            await self.start(slot)
            return
        await asyncio.sleep(self.stopped_s)
        os.kill(slot.pid, signal.SIGCONT)
        slot.down = False

    def proxy(self, name: str, faults: FaultPlan) -> Proxy:
        """Return a proxy in front of a process."""
        slot = self.slots[name]

        def target() -> int | None:
            # The kernel still accepts connections of a stopped process.
            return slot.port or None

        return Proxy(slot.kind, target, faults.next, lambda how: self.grip(name, how))

    @property
    def lost(self) -> list[str]:
        """Log lines about prompts that no script continues."""
        path = self.folder / LOST
        return path.read_text().splitlines() if path.exists() else []


@dataclass
class FaultPlan:
    """Faults by the name of the talk: the first is for its first generation, and so on."""

    planned: dict[str, list[Fault]] = field(default_factory=dict)
    fired: int = 0

    def next(self, talk: str) -> Fault | None:
        remaining = self.planned.get(talk)
        if not remaining:
            return None
        self.fired += 1
        return remaining.pop(0)


@asynccontextmanager
async def rack(folder: Path, names: list[str]) -> AsyncIterator[Rack]:
    """Run backends until the context exits. A name is a kind, or a kind and a number: `vllm 2`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.chaos.backend",
        str(folder),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    running = Rack(folder, process)
    try:
        for name in names:
            running.slots[name] = Slot(name.split()[0])
            await running.start(running.slots[name])
        yield running
    finally:
        await running.settled()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
