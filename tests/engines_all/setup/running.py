"""Commands of a set-up: their output goes to a log, and one that fails says so with the end of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.engines_all.setup.places import LOGS

SHOWN = 40
"""Lines of a log shown when a command fails."""


class SetupFailed(Exception):
    """An engine cannot be set up; the message says what failed and why."""


class Commands:
    """Runs the commands of one engine's set-up, one after the other, politely towards the rest of the machine."""

    def __init__(self, engine: str) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        self._engine = engine
        self._log = LOGS / f"setup-{engine}.log"
        self._log.write_bytes(b"")

    def run(
        self, what: str, *command: str | Path, folder: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """`variables` are added to the environment. Raises SetupFailed."""
        print(f"  {self._engine}: {what} ", end="", flush=True)
        started = time.monotonic()
        with self._log.open("ab") as log:
            log.write(f"\n$ {' '.join(map(str, command))}\n".encode())
            log.flush()
            try:
                ended = subprocess.run(
                    ["nice", "-n", "15", *command], cwd=folder, env={**os.environ, **(variables or {})},
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip
            except OSError as error:
                print("failed")
                raise SetupFailed(f"{what}: {error}") from error
        if ended.returncode:
            print("failed")
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-SHOWN:])
            raise SetupFailed(f"{what}: ended with {ended.returncode}; the end of {self._log}:\n{tail}")
        print(f"({time.monotonic() - started:.0f} s)", flush=True)

    def environment(self, folder: Path) -> Path:
        """A new virtual environment with a current pip; returns its Python."""
        self.run("virtual environment", sys.executable, "-m", "venv", "--clear", folder)
        python = folder / "bin" / "python"
        self.install(python, "pip", "--upgrade", "pip")
        return python

    def install(self, python: Path, what: str, *packages: str | Path) -> None:
        self.run(what, python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off", *packages)
