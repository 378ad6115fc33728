"""One run of code, from its text to what came of it.

Whatever happens, it is over when its time is: the process group is ended with the run, and at once with a call that is
cancelled; the first process keeps the time even when the server is no more. Output is kept from its beginning and from
its end, since errors stand last.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from unisono.toolservers.python.ways import Way, command

MIB: Final = 1024 * 1024
FLOOD_BYTES: Final = 32 * MIB
"""Output of which most would be thrown away: the run is ended there."""
STATUS_BYTES: Final = 1000
LATE_S: Final = 5.0
"""How long after its time the first process may still take to say how the run ended."""


class Busy(Exception):
    """More runs are waiting than are taken."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one run: in seconds, bytes and numbers. `output` is what is kept of it; memory counts for each process."""

    seconds: float = 30.0
    cpu_s: int = 30
    memory: int = 1024 * MIB
    file: int = 64 * MIB
    files: int = 128
    processes: int = 32
    output: int = 32 * 1024

    @property
    def resources(self) -> dict[str, int]:
        return {
            "CPU": self.cpu_s,
            "AS": self.memory,
            "FSIZE": self.file,
            "NOFILE": self.files,
            "NPROC": self.processes,
            "CORE": 0,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """`logs` is what was printed, errors included, within its bound. `exit_code` is negative for a signal, None when
    nobody can say."""

    logs: str
    exit_code: int | None
    timed_out: bool
    left_out: int = 0
    """Bytes of output that are not in `logs`."""

    @property
    def remark(self) -> str:
        """What the output itself does not tell, empty when there is nothing to add."""
        if self.timed_out:
            return "[The time limit was reached; the program was ended.]"
        if self.exit_code is None:
            return "[The program was ended.]"
        if self.exit_code < 0:
            name = next((number.name for number in signal.Signals if number == -self.exit_code), "a signal")
            return f"[The program was ended by {name}, as happens at a limit of CPU time, memory or output.]"
        if self.exit_code > 0 and not self.logs:
            return f"[The program ended with exit code {self.exit_code}.]"
        return "" if self.logs else "[No output. Use print() to see values.]"


@dataclass(slots=True)
class Output:
    """What is kept of a stream: half of `most` bytes from its beginning, half from its end."""

    most: int
    total: int = 0
    _first: bytearray = field(default_factory=bytearray)
    _last: deque[bytes] = field(default_factory=deque)
    _held: int = 0

    def add(self, chunk: bytes) -> None:
        self.total += len(chunk)
        room = self.most // 2 - len(self._first)
        if room > 0:
            self._first += chunk[:room]
            chunk = chunk[room:]
        self._last.append(chunk)
        self._held += len(chunk)
        while self._last and self._held - len(self._last[0]) >= self.most // 2:
            self._held -= len(self._last.popleft())

    def text(self) -> tuple[str, int]:
        """The text, with a mark where something is missing, and how many bytes that is."""
        last = b"".join(self._last)[-(self.most // 2) :]
        missing = self.total - len(self._first) - len(last)
        if not missing:
            return (bytes(self._first) + last).decode("utf-8", "replace"), 0
        first = self._first.decode("utf-8", "replace")
        return f"{first}\n[... {missing} bytes are left out ...]\n{last.decode('utf-8', 'replace')}", missing


class Runner:
    """Runs code in one `way`: `at_once` runs together, four times as many waiting."""

    def __init__(self, way: Way, limits: Limits | None = None, at_once: int = 4) -> None:
        self.way = way
        self.limits = limits or Limits()
        self._places = asyncio.Semaphore(at_once)
        self._most_waiting = 4 * at_once
        self._waiting = 0

    async def run(self, code: str) -> Outcome:
        """What came of `code`. Raises `Busy`, and OSError when there is no room for another process."""
        if self._places.locked() and self._waiting >= self._most_waiting:
            raise Busy
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        try:
            return await self._in_folder(code)
        finally:
            self._places.release()

    async def _in_folder(self, code: str) -> Outcome:
        folder = Path(tempfile.mkdtemp(prefix="unisono-python-"))
        try:
            script, directory = folder / "script.py", folder / "work"
            script.write_bytes(code.encode("utf-8", "replace"))
            directory.mkdir()
            if self.way.user is not None:
                for path in (folder, script, directory):
                    os.chown(path, self.way.user, self.way.user)
            return await self._watched(script, directory)
        finally:
            # A run may leave much behind, and may have made it hard to delete.
            await asyncio.shield(asyncio.to_thread(_delete, folder))

    async def _watched(self, script: Path, directory: Path) -> Outcome:
        limits = self.limits
        end, status = os.pipe()
        process: asyncio.subprocess.Process | None = None
        output = Output(limits.output)
        overdue = False
        try:
            process = await asyncio.create_subprocess_exec(
                *command(self.way, status, script, directory, limits.resources, limits.seconds),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(status,),
                env={},
                cwd="/",
                start_new_session=True,
            )
            os.close(status)
            status = -1
            try:
                async with asyncio.timeout(limits.seconds + LATE_S):
                    await _collect(process, output)
                    await process.wait()
            except TimeoutError:
                overdue = True
            _end(process)
            return _outcome(_said(end), output, overdue)
        finally:
            os.close(end)
            if status >= 0:
                os.close(status)
            if process is not None:
                _end(process)
                await asyncio.shield(process.wait())


async def _collect(process: asyncio.subprocess.Process, output: Output) -> None:
    """Read until the output ends, or is too much. Whoever was left behind with the output open does not count."""
    assert process.stdout is not None
    ended = asyncio.ensure_future(process.wait())
    try:
        while output.total < FLOOD_BYTES:
            reading = asyncio.ensure_future(process.stdout.read(65536))
            try:
                await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    # What was written before the end is there at once.
                    await asyncio.wait({reading}, timeout=0.1)
            finally:
                if not reading.done():
                    reading.cancel()
            chunk = b"" if reading.cancelled() or not reading.done() else reading.result()
            if not chunk:
                return
            output.add(chunk)
        _end(process)
    finally:
        ended.cancel()


def _end(process: asyncio.subprocess.Process) -> None:
    """End the whole group. Its number is not anybody else's before it is waited for, and harmless when it is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _said(end: int) -> dict[str, object]:
    """What the first process wrote about the end of the run. Not to be trusted: the code may have written it."""
    os.set_blocking(end, False)
    try:
        said = json.loads(os.read(end, STATUS_BYTES))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _outcome(said: dict[str, object], output: Output, overdue: bool) -> Outcome:
    logs, left_out = output.text()
    code, number = said.get("exit"), said.get("signal")
    exit_code = code if isinstance(code, int) else -number if isinstance(number, int) else None
    return Outcome(logs, exit_code, overdue or said.get("timed_out") is True, left_out)


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        for path, _, _ in os.walk(folder):
            with suppress(OSError):
                Path(path).chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)
