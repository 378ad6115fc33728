"""Programs of the npm packages of OpenAI, Anthropic and Vercel against the gateways.

The tests themselves are written for the test runner of Node.js. A copy of them runs beside the installed packages,
because Node.js looks for packages in the folders above a program.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Stage

SOURCE = Path(__file__).parent
HOME = Path(__file__).parents[4] / ".envs/node"
PROGRAMS = sorted(path.name for path in SOURCE.glob("check_*.mjs"))
TIMEOUT_S = 300.0


@pytest.fixture(scope="session")
def node() -> str:
    """Path of Node.js: the one of npm, or that of the system on a platform without it."""
    packaged = sorted(HOME.glob("node_modules/node-*/bin/node"))
    return str(packaged[0]) if packaged else "node"


@pytest.fixture(scope="session")
def programs() -> Path:
    """Folder of the copied programs."""
    folder = HOME / "programs"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("*.py", "*.json", "__pycache__"))
    return folder


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_node_passes(node: str, programs: Path, stage: Stage, program: str) -> None:
    process = subprocess.run(
        [node, "--test", "--test-reporter=spec", program],
        cwd=programs,
        env={**os.environ, "STAGE": json.dumps(asdict(stage)), "NO_COLOR": "1", "FORCE_COLOR": "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert process.returncode == 0, process.stdout + process.stderr
