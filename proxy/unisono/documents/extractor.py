"""Extraction of text from HTML and PDF files in a separate process, one per file.

The parsers are large and their input may be hostile. The process has limits on memory, time, output and files, and an
empty environment. Its process group is killed at the end, at its time limit, or if the request is cancelled.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unisono.core.tasks import cancel_all
from unisono.documents.formats import ExtractProblem, FileFormat
from unisono.errors import FilesBusy, well_formed

WORKER: Final = Path(__file__).with_name("worker.py")
# Maximum number of concurrent processes, and of files that wait for a process. Further files are refused.
AT_ONCE = 2
MAX_WAITING = 64
# Time in seconds to start the process, in addition to the limit for the file itself.
START_S: Final = 5.0
READ_BYTES: Final = 65_536
# Maximum bytes of a result without its text, and of one character in JSON.
RESULT_BYTES = 1_000
CHARACTER_BYTES = 6


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits for one file: size in bytes, pages, characters of its text, and time in seconds.

    `memory` limits the memory of the process that reads the file, in bytes.
    """

    max_bytes: int = 10 * 1024 * 1024
    max_pages: int = 500
    max_characters: int = 1_000_000
    timeout_s: float = 20.0
    memory: int = 256 * 1024 * 1024

    @property
    def resources(self) -> dict[str, int]:
        """Resource limits of the process, which also forbid writing files and starting processes."""
        cpu_s = max(1, int(self.timeout_s))
        return {"AS": self.memory, "CPU": cpu_s, "FSIZE": 0, "NOFILE": 64, "NPROC": 0, "CORE": 0}


@dataclass(frozen=True, slots=True)
class ExtractedText:
    """Text of a file, or a problem.

    `unread_pages` is the number of pages of a PDF without readable text.
    """

    text: str = ""
    unread_pages: int = 0
    problem: ExtractProblem | None = None


class TextExtractor:
    """Extractor that starts a process for each file.

    At most `at_once` processes run at the same time, and at most `max_waiting` files wait for a process.
    """

    def __init__(self, limits: FileLimits, at_once: int = AT_ONCE, max_waiting: int = MAX_WAITING) -> None:
        self._limits = limits
        self._slots = asyncio.Semaphore(at_once)
        self._max_waiting = max_waiting
        self._waiting = 0

    async def extract(self, format: FileFormat, data: bytes, charset: str) -> ExtractedText:
        """Return the text of a file. Raises FilesBusy if too many files are waiting."""
        async with self._slot():
            return await self._run(format, data, charset)

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        if self._slots.locked() and self._waiting >= self._max_waiting:
            raise FilesBusy("Too many files are being read; try again later.", retry_after_s=1.0)
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._slots.release()

    async def _run(self, format: FileFormat, data: bytes, charset: str) -> ExtractedText:
        limits = self._limits
        settings = {
            "format": format,
            "charset": charset,
            "max_pages": limits.max_pages,
            "max_characters": limits.max_characters,
            "limits": limits.resources,
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", str(WORKER), json.dumps(settings)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(limits.timeout_s + START_S):
                output = await _exchange(process, data, limits.max_characters * CHARACTER_BYTES + RESULT_BYTES)
        except TimeoutError:
            return ExtractedText(problem=ExtractProblem.TOO_SLOW)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            code = await asyncio.shield(process.wait())
        if output is None:
            return ExtractedText(problem=ExtractProblem.TOO_LONG)
        # Each of these signals can end a process at its CPU time limit. At its memory limit, a process ends with a
        # code.
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            return ExtractedText(problem=ExtractProblem.TOO_SLOW)
        return await asyncio.to_thread(_result, output)


async def _exchange(process: asyncio.subprocess.Process, data: bytes, most: int) -> bytes | None:
    """Send the file and return the output; None if it is longer than `most` bytes."""
    assert process.stdin is not None
    assert process.stdout is not None
    sending = asyncio.create_task(_send(process.stdin, data))
    output = bytearray()
    try:
        while chunk := await process.stdout.read(READ_BYTES):
            output += chunk
            if len(output) > most:
                return None
        await process.wait()
        return bytes(output)
    finally:
        await cancel_all(sending)


async def _send(stdin: asyncio.StreamWriter, data: bytes) -> None:
    # The process may end before it has read everything.
    with suppress(BrokenPipeError, ConnectionResetError):
        stdin.write(data)
        await stdin.drain()
        stdin.close()
        await stdin.wait_closed()


def _result(output: bytes) -> ExtractedText:
    """Parse the output of the extraction process.

    The output is not trusted, because a hostile file may have taken control of that process.
    """
    try:
        result = json.loads(output)
    except (ValueError, RecursionError):
        # A process that reaches its memory limit ends without a result.
        return ExtractedText(problem=ExtractProblem.TOO_LARGE)
    if not isinstance(result, dict):
        return ExtractedText(problem=ExtractProblem.BROKEN)
    text, unread = result.get("text"), result.get("unread_pages")
    if isinstance(text, str):
        return ExtractedText(well_formed(text), unread if isinstance(unread, int) else 0)
    known = [problem for problem in ExtractProblem if problem == result.get("problem")]
    return ExtractedText(problem=known[0] if known else ExtractProblem.BROKEN)
