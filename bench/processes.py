"""Processes of a run, pinned to CPUs and terminated at the end."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO


@dataclass(frozen=True, slots=True)
class Cpus:
    """CPUs for the process under test, and those for the rest of the run; empty if not pinned."""

    tested: frozenset[int] = frozenset()
    others: frozenset[int] = frozenset()


def split_cpus() -> Cpus:
    """Reserve the last CPU for the process under test, if the system has two and can pin."""
    if not hasattr(os, "sched_getaffinity"):
        return Cpus()
    *others, last = sorted(os.sched_getaffinity(0))
    return Cpus(frozenset({last}), frozenset(others)) if others else Cpus()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class StartError(Exception):
    """A process ended or did not become ready; the message contains the end of its log."""


def _compiled(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which Python keeps compiled modules, as in an installation."""
    return {name: value for name, value in variables.items() if name != "PYTHONDONTWRITEBYTECODE"}


class Process:
    """Child process with its output in a file; it is terminated at the end of the `with` block."""

    def __init__(
        self,
        name: str,
        command: list[str],
        folder: Path,
        cpus: frozenset[int],
        *,
        piped: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._log = folder / f"{name}.log"
        self.name = name
        pipe = subprocess.PIPE if piped else subprocess.DEVNULL
        variables = {**_compiled(os.environ), **(env or {})}
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                command, stdin=pipe, stdout=pipe if piped else log, stderr=log, env=variables
            )
        if cpus:
            os.sched_setaffinity(self._child.pid, cpus)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        if self._child.stdin is None or self._child.stdout is None:
            raise ValueError(f"process {self.name} has no pipes: start it with `piped=True`")
        return self._child.stdin, self._child.stdout

    def wait_ready(self, port: int, path: str, limit_s: float = 120.0) -> float:
        """Wait until `GET path` returns 200 and return the seconds it took.

        An empty path waits for an open port. Raises StartError.
        """
        started_at = time.monotonic()
        while time.monotonic() - started_at < limit_s:
            if self._child.poll() is not None:
                raise StartError(f"{self.name} ended with {self._child.returncode}:\n{self.log_tail()}")
            if _is_ready(port, path):
                return time.monotonic() - started_at
            time.sleep(0.02)
        raise StartError(f"{self.name} was not ready within {limit_s:.0f} s:\n{self.log_tail()}")

    def log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.terminate()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()


def http_call(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _is_ready(port: int, path: str) -> bool:
    try:
        if path:
            return http_call(port, "GET", path)[0] == 200
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except (OSError, http.client.HTTPException):
        return False
    return True
