"""Programs of the guide to clients and frameworks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

GUIDE = Path(__file__).parents[3] / "docs/guides/clients-and-frameworks.md"
TIMEOUT_S = 120.0


def run_program(heading: str, address: str) -> tuple[str, str]:
    """Run the program below a heading against the gateway at an address.

    Returns its output and the output on the page.
    """
    section = GUIDE.read_text().partition(f"\n## {heading}\n")[2]
    match = re.search(r"^```python\n(.*?)^```\n\n^```\n(.*?)^```$", section, re.S | re.M)
    assert match is not None
    program = match[1].replace("http://localhost:4000", address)
    assert program != match[1]
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
    )
    return process.stdout, match[2]
