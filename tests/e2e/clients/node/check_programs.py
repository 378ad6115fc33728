"""Programs of the npm packages of OpenAI, Anthropic and Vercel against the gateways.

The tests themselves are written for the test runner of Node.js. A copy of them runs beside the installed packages,
because Node.js looks for packages in the folders above a program.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from guide import GUIDE, read_program

if TYPE_CHECKING:
    from conftest import Stage

SOURCE = Path(__file__).parent
HOME = Path(__file__).parents[4] / ".envs/node"
PROGRAMS = sorted(path.name for path in SOURCE.glob("check_*.mjs"))
TIMEOUT_S = 600.0
HEADING = "Vercel AI SDK, and other libraries for Node.js"
# Packages that only the tests use.
TOOLS = ("typescript", "zod")
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def run_node() -> Run:
    """Function that runs Node.js beside the installed packages: that of npm, or that of the system."""
    folder = HOME / "programs"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("*.py", "*.json", "__pycache__"))
    executable = next(map(str, HOME.glob("node_modules/node-*/bin/node")), "node")

    def run_node(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **variables, "NO_COLOR": "1"}
        command = [executable, *arguments]
        return subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )

    return run_node


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_node_passes(run_node: Run, stage: Stage, program: str) -> None:
    process = run_node("--test", "--test-reporter=spec", program, STAGE=json.dumps(asdict(stage)))
    assert process.returncode == 0, process.stdout + process.stderr


def test_the_program_of_the_guide_prints_what_the_page_says(run_node: Run, stage: Stage) -> None:
    program, expected = read_program(HEADING, stage.demo, "js")
    process = run_node("--input-type=module", "--eval", program)
    assert process.stdout == expected, process.stderr


def test_the_guide_names_the_locked_versions() -> None:
    locked = json.loads((SOURCE / "package.json").read_text())["dependencies"]
    named = dict(re.findall(r"^\| `(\S+)` \| (\d\S+) \|", GUIDE.read_text(), re.M))
    assert named == {name: version for name, version in locked.items() if name not in TOOLS}
