"""The stage every suite stands on: gateways in processes of their own, started once and gone with whoever asked."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
END_S = 40.0


@dataclass(frozen=True)
class Stage:
    """Addresses without `/v1`. `demo` wants no key, `scripted` wants `key`. `tools` are those of the tool servers of
    `scripted`, by their labels."""

    demo: str
    scripted: str
    key: str
    tools: dict[str, str]


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """Both gateways. They end with this process however it ends, since the stage waits for the end of its stdin."""
    command = [str(ROOT / ".venv/bin/python"), "-m", "tests.e2e.clients.stage"]
    with (
        tempfile.TemporaryFile("w+") as trouble,
        subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=trouble, text=True
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if addresses := process.stdout.readline():
                yield Stage(**json.loads(addresses))
        finally:
            process.stdin.close()
            try:
                code = process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        trouble.seek(0)
        said = trouble.read()
        if not addresses:
            pytest.exit(f"the gateways did not start: {said}", returncode=1)
        assert code == 0, said
