"""Colours are for terminals whose owner did not say no."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Mapping

import pytest

ASK = "from unisono.cli.terminal_escape import has_colour; print(has_colour())"
TERMINALS: dict[str, tuple[bool, Mapping[str, str], str]] = {
    "a terminal": (True, {}, "True"),
    "a terminal without colours": (True, {"NO_COLOR": "1"}, "False"),
    "an empty NO_COLOR": (True, {"NO_COLOR": ""}, "True"),
    "a pipe": (False, {}, "False"),
}


@pytest.mark.parametrize(("terminal", "environment", "shown"), TERMINALS.values(), ids=TERMINALS)
def test_colours_are_shown_where_they_are_wanted(terminal: bool, environment: Mapping[str, str], shown: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    reading, writing = pty.openpty() if terminal else os.pipe()
    try:
        subprocess.run([sys.executable, "-c", ASK], stdout=writing, env={**inherited, **environment}, check=True)
        assert os.read(reading, 64).decode().strip() == shown
    finally:
        os.close(reading)
        os.close(writing)
