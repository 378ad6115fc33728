"""A stage for clients that have an environment of their own: gateways, started by a process in the project's, which
ends with whoever asked for it. Knows nothing but the standard library and pytest."""

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
    """What the stage that is run as `module` wrote when all was ready: one line of JSON. It ends with this process
    however that ends, since it waits for the end of its stdin."""
    with (
        tempfile.TemporaryFile("w+") as trouble,
        subprocess.Popen(
            [str(ROOT / ".venv/bin/python"), "-m", module],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=trouble,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if written := process.stdout.readline():
                yield json.loads(written)
        finally:
            process.stdin.close()
            try:
                code = process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        trouble.seek(0)
        said = trouble.read()
        if not written:
            pytest.exit(f"the gateways did not start: {said}", returncode=1)
        assert code == 0, said
