"""A running Presidio service."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).parent
PYTHON = FOLDER.parent.parent / ".envs/presidio/bin/python"


@contextmanager
def presidio(log: Path) -> Iterator[str]:
    """Run the service and yield its address. `log` receives the paths of its requests."""
    command = [PYTHON, FOLDER / "presidio_service.py"]
    with (
        log.open("w") as file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()
