"""The backends of a storm: one process of each kind, that is killed, stopped and put back, and the proxies before
them."""

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
DOWN_S = 0.3
"""How long a killed process is missing."""


@dataclass
class Slot:
    """One process: its pid and port change when it is killed and put back. `down` is when nobody is there."""

    kind: str
    pid: int = 0
    port: int = 0
    down: bool = False


@dataclass
class Rack:
    """`slots` by name: the kind, and a number where there are several of it."""

    folder: Path
    process: asyncio.subprocess.Process
    slots: dict[str, Slot] = field(default_factory=dict)
    grips: int = 0
    stopped_s: float = 6.0
    """How long a stopped process is stopped: longer than anybody waits for a token."""
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _tending: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self, slot: Slot) -> None:
        async with self._starting:
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.write(f"{slot.kind}\n".encode())
            async with asyncio.timeout(60):
                said = (await self.process.stdout.readline()).split()
        slot.pid, slot.port, slot.down = int(said[0]), int(said[1]), False

    def grip(self, name: str, how: str) -> None:
        """`kill` a process, or `stop` it, unless one is down already: one at a time, so that others can take it."""
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
        """How many processes are gone at the moment."""
        return sum(slot.down for slot in self.slots.values())

    async def settled(self) -> None:
        """Everything that was gripped is back."""
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
        """In front of a process."""
        slot = self.slots[name]

        def target() -> int | None:
            # A stopped process still accepts: its kernel does.
            return slot.port or None

        return Proxy(slot.kind, target, faults.next, lambda how: self.grip(name, how))

    @property
    def lost(self) -> list[str]:
        """What backends were asked that made no sense."""
        path = self.folder / LOST
        return path.read_text().splitlines() if path.exists() else []


@dataclass
class FaultPlan:
    """Faults by the name of the talk they happen to: the first for its first generation, and so on."""

    planned: dict[str, list[Fault]] = field(default_factory=dict)
    fired: int = 0

    def next(self, talk: str) -> Fault | None:
        left = self.planned.get(talk)
        if not left:
            return None
        self.fired += 1
        return left.pop(0)


@asynccontextmanager
async def rack(folder: Path, names: list[str]) -> AsyncIterator[Rack]:
    """Running backends, gone afterwards. A name is a kind, or a kind and a number: `vllm 2`."""
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
    here = Rack(folder, process)
    try:
        for name in names:
            here.slots[name] = Slot(name.split()[0])
            await here.start(here.slots[name])
        yield here
    finally:
        await here.settled()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
