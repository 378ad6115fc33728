"""Commands of a set-up: output goes to a log, and an error shows the end of the log."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.engines_all.setup.places import LOGS

# Lines of the log in the error of a failed command.
LOG_TAIL_LINES = 40


class SetupFailed(Exception):
    """An engine cannot be set up. The message has the failed command and the reason."""


class Commands:
    """Runner of the set-up commands of one engine, one after the other and at low priority."""

    def __init__(self, engine: str) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        self._engine = engine
        self._log = LOGS / f"setup-{engine}.log"
        self._log.write_bytes(b"")

    def run(
        self, label: str, *command: str | Path, folder: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """Run a command with `variables` added to the environment. Raise SetupFailed if it fails."""
        print(f"  {self._engine}: {label} ", end="", flush=True)
        started = time.monotonic()
        with self._log.open("ab") as log:
            log.write(f"\n$ {' '.join(map(str, command))}\n".encode())
            log.flush()
            try:
                result = subprocess.run(
                    ["nice", "-n", "15", *command], cwd=folder, env={**os.environ, **(variables or {})},
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip
            except OSError as error:
                print("failed")
                raise SetupFailed(f"{label}: {error}") from error
        if result.returncode:
            print("failed")
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
            raise SetupFailed(f"{label}: exited with {result.returncode}; the end of {self._log}:\n{tail}")
        print(f"({time.monotonic() - started:.0f} s)", flush=True)

    def environment(self, folder: Path) -> Path:
        """Create a virtual environment with a current pip, and return its Python."""
        self.run("virtual environment", sys.executable, "-m", "venv", "--clear", folder)
        python = folder / "bin" / "python"
        self.install(python, "pip", "--upgrade", "pip")
        return python

    def install(self, python: Path, label: str, *packages: str | Path) -> None:
        self.run(label, python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off", *packages)
