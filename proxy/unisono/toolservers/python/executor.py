"""Execution of one run of code, from its text to its outcome.

Every run ends at its time limit. Its process group is killed at the end of the run, or at once if the call is
cancelled. The first process of a run enforces the time limit too, even if the server has died. Output is truncated in
the middle, because errors appear at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import secrets
import signal
import tempfile
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from unisono.toolservers.python.run_files import delete_tree
from unisono.toolservers.python.sandbox_probe import NOBODIES, RunDirectory, Sandbox, command, prepare

MIB: Final = 1024 * 1024
# Output in bytes at which a run is ended, because most of the output would be discarded.
FLOOD_BYTES: Final = 32 * MIB
# The status is one short JSON object, written with a single call.
STATUS_BYTES: Final = 1000
# Additional time for the first process to report the outcome, in seconds.
LATE_S: Final = 5.0


class Busy(Exception):
    """Raised when too many runs are queued."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Limits of one run, in seconds, bytes and numbers.

    `memory` limits the address space of each process and the memory of all processes together. `disk` limits all files
    together, `file` each file. `output` limits the returned output.
    """

    seconds: float = 30.0
    cpu_s: int = 30
    memory: int = 1024 * MIB
    file: int = 64 * MIB
    disk: int = 256 * MIB
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
class RunOutcome:
    """Outcome of one run.

    `logs` is the output including error output, truncated to its limit. `exit_code` is the negative signal number if a
    signal ended the code, and None if it is unknown.
    """

    logs: str
    exit_code: int | None
    timed_out: bool
    # Number of output bytes that `logs` omits.
    left_out: int = 0
    disk_full: bool = False
    memory_full: bool = False
    limits: RunLimits = RunLimits()

    @property
    def remark(self) -> str:
        """Remark that tells the model what the output does not show, or an empty string."""
        if self.disk_full:
            return f"[The program exceeded its limit of {self.limits.disk // MIB:,} MiB for files and was stopped.]"
        if self.memory_full:
            return f"[The program exceeded its memory limit of {self.limits.memory // MIB:,} MiB and was stopped.]"
        if self.timed_out:
            return f"[The program exceeded its time limit of {self.limits.seconds:g} s and was stopped.]"
        if self.exit_code is None:
            return "[The program was stopped.]"
        if self.exit_code < 0:
            name = next((number.name for number in signal.Signals if number == -self.exit_code), "a signal")
            return f"[The program was ended by {name}. It may have exceeded a limit of CPU time, memory or output.]"
        if self.exit_code > 0 and not self.logs:
            return f"[The program exited with code {self.exit_code}.]"
        return "" if self.logs else "[No output. Use print() to see values.]"


@dataclass(slots=True)
class CapturedOutput:
    """Output buffer that stores the first and the last `max_bytes / 2` bytes of a stream."""

    max_bytes: int
    total: int = 0
    _first: bytearray = field(default_factory=bytearray)
    _last: deque[bytes] = field(default_factory=deque)
    _size: int = 0

    def add(self, chunk: bytes) -> None:
        self.total += len(chunk)
        room = self.max_bytes // 2 - len(self._first)
        if room > 0:
            self._first += chunk[:room]
            chunk = chunk[room:]
        self._last.append(chunk)
        self._size += len(chunk)
        while self._last and self._size - len(self._last[0]) >= self.max_bytes // 2:
            self._size -= len(self._last.popleft())

    def text(self) -> tuple[str, int]:
        """Return the text, with a mark where bytes are missing, and the number of missing bytes."""
        last = b"".join(self._last)[-(self.max_bytes // 2) :]
        missing = self.total - len(self._first) - len(last)
        if not missing:
            return (bytes(self._first) + last).decode("utf-8", "replace"), 0
        first = self._first.decode("utf-8", "replace")
        return f"{first}\n[... {missing} bytes omitted ...]\n{last.decode('utf-8', 'replace')}", missing


class CodeRunner:
    """Executor of code in one kind of sandbox.

    At most `at_once` runs execute at the same time, and four times as many wait.
    """

    def __init__(self, way: Sandbox, limits: RunLimits | None = None, at_once: int = 4) -> None:
        self.sandbox = way
        self.limits = limits or RunLimits()
        self._slots = asyncio.Semaphore(at_once)
        self._max_waiting = 4 * at_once
        self._waiting = 0
        self._free_users: set[int | None] = set()

    async def run(self, code: str) -> RunOutcome:
        """Run `code`.

        Raises `Busy` if too many runs are waiting, and OSError if no further process can be created.
        """
        if self._slots.locked() and self._waiting >= self._max_waiting:
            raise Busy
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            return await self._in_folder(code)
        finally:
            self._slots.release()

    async def _in_folder(self, code: str) -> RunOutcome:
        folder = Path(tempfile.mkdtemp(prefix="unisono-python-"))
        user = self._unused_user() if self.sandbox.drops else None
        try:
            place = prepare(folder, code.encode("utf-8", "replace"), user)
            return await self._run_watched(place)
        finally:
            # Removal can take long: a run may leave many files and change their modes.
            self._free_users.discard(user)
            await asyncio.shield(asyncio.to_thread(delete_tree, str(folder)))

    def _unused_user(self) -> int:
        """Reserve an unused user id.

        It is random, because other servers on this machine reserve ids too.
        """
        known = {entry.pw_uid for entry in pwd.getpwall()}
        free = [number for number in NOBODIES if number not in self._free_users and number not in known]
        number = secrets.choice(free)
        self._free_users.add(number)
        return number

    async def _run_watched(self, place: RunDirectory) -> RunOutcome:
        limits = self.limits
        output = CapturedOutput(limits.output)
        overdue = False
        with Pipe() as printed, Pipe() as status:
            process = await asyncio.create_subprocess_exec(
                *command(
                    self.sandbox, status.write, place, limits.resources, limits.seconds, limits.disk, limits.memory
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=printed.write,
                stderr=printed.write,
                pass_fds=(status.write,),
                env={},
                cwd="/",
                start_new_session=True,
            )
            printed.close_write()
            status.close_write()
            try:
                async with asyncio.timeout(limits.seconds + LATE_S):
                    await _collect(printed.read, process, output)
            except TimeoutError:
                overdue = True
            finally:
                _end(process)
                await asyncio.shield(process.wait())
            return _outcome(_parse_status(status.read), output, limits, overdue)


class Pipe:
    """Pipe whose ends are closed at the end of the context."""

    def __enter__(self) -> Pipe:
        self.read, self.write = os.pipe()
        self._writing = True
        return self

    def close_write(self) -> None:
        if self._writing:
            self._writing = False
            os.close(self.write)

    def __exit__(self, *_: object) -> None:
        self.close_write()
        os.close(self.read)


async def _collect(end: int, process: asyncio.subprocess.Process, output: CapturedOutput) -> None:
    """Read from `end` until the process ends or its output exceeds the limit.

    Does not wait for other processes that still hold the output open.
    """
    loop = asyncio.get_running_loop()
    enough = asyncio.Event()

    def readable() -> None:
        if not _read(end, output):
            loop.remove_reader(end)
            enough.set()

    os.set_blocking(end, False)
    loop.add_reader(end, readable)
    waits = {asyncio.ensure_future(process.wait()), asyncio.ensure_future(enough.wait())}
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if output.total >= FLOOD_BYTES:
            _end(process)
        await process.wait()
    finally:
        loop.remove_reader(end)
        for wait in waits:
            wait.cancel()
    # All output that was written before the end is available now.
    while _read(end, output):
        continue


def _read(end: int, output: CapturedOutput) -> bool:
    """Read available output. Return False if no more can be read now, or ever."""
    try:
        chunk = os.read(end, 65536)
    except BlockingIOError:
        return False
    output.add(chunk)
    return bool(chunk) and output.total < FLOOD_BYTES


def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the whole process group. A missing group is ignored.

    The system does not reuse the id of the group before `process.wait` has returned.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _parse_status(end: int) -> dict[str, object]:
    """Return the status that the first process reported.

    It is untrusted: the code may have written it.
    """
    os.set_blocking(end, False)
    try:
        status = json.loads(os.read(end, STATUS_BYTES))
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def _outcome(status: dict[str, object], output: CapturedOutput, limits: RunLimits, overdue: bool) -> RunOutcome:
    logs, left_out = output.text()
    code, number = status.get("exit"), status.get("signal")
    exit_code = code if isinstance(code, int) else -number if isinstance(number, int) else None
    limit = status.get("limit")
    return RunOutcome(logs, exit_code, overdue or limit == "time", left_out, limit == "disk", limit == "memory", limits)
