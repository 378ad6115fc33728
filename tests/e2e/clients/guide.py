"""Programs of the guide to clients and frameworks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

GUIDE = Path(__file__).parents[3] / "docs/guides/clients-and-frameworks.md"
TIMEOUT_S = 120.0


def read_program(heading: str, address: str, language: str = "python") -> tuple[str, str]:
    """Return the program below a heading, for the gateway at an address, and its output on the page."""
    section = GUIDE.read_text().partition(f"\n## {heading}\n")[2]
    match = re.search(rf"^```{language}\n(.*?)^```\n\n^```\n(.*?)^```$", section, re.S | re.M)
    assert match is not None
    program = match[1].replace("http://localhost:4000", address)
    assert program != match[1]
    return program, match[2]


def run_program(heading: str, address: str) -> tuple[str, str]:
    """Run the program below a heading, and return its output and the output on the page."""
    program, expected = read_program(heading, address)
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
    )
    return process.stdout, expected
