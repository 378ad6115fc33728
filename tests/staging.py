"""Gateways for clients that run in a separate virtual environment.

A child process in the project's environment starts the gateways and ends with this process. This module imports only
the standard library and pytest.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
END_S = 40.0


@contextmanager
def staged(module: str) -> Iterator[dict[str, Any]]:
    """Run `module` in the project's environment and yield the JSON line that it prints when its gateways are ready.

    The child process waits for the end of its stdin, so it ends with this process in any case.
    """
    with (
        tempfile.TemporaryFile("w+") as stderr_file,
        subprocess.Popen(
            [str(ROOT / ".venv/bin/python"), "-m", module],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr_file,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if ready_line := process.stdout.readline():
                yield json.loads(ready_line)
        finally:
            process.stdin.close()
            try:
                code = process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        stderr_file.seek(0)
        stderr_text = stderr_file.read()
        if not ready_line:
            pytest.exit(f"the gateways did not start: {stderr_text}", returncode=1)
        assert code == 0, stderr_text
