"""Detection of terminals that show colours."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Mapping

import pytest

SCRIPT = "from unisono.cli.terminal import has_colour; print(has_colour())"
TERMINALS: dict[str, tuple[bool, Mapping[str, str], str]] = {
    "a terminal": (True, {}, "True"),
    "NO_COLOR is set": (True, {"NO_COLOR": "1"}, "False"),
    "NO_COLOR is empty": (True, {"NO_COLOR": ""}, "True"),
    "a pipe": (False, {}, "False"),
}


@pytest.mark.parametrize(("terminal", "environment", "expected"), TERMINALS.values(), ids=TERMINALS)
def test_colours_need_a_terminal_without_no_color(
    terminal: bool, environment: Mapping[str, str], expected: str
) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    read_end, write_end = pty.openpty() if terminal else os.pipe()
    try:
        subprocess.run([sys.executable, "-c", SCRIPT], stdout=write_end, env={**inherited, **environment}, check=True)
        assert os.read(read_end, 64).decode().strip() == expected
    finally:
        os.close(read_end)
        os.close(write_end)
