"""Earlier version of the gateway as a process, for tests of two versions on one store.

The source of the earlier version is extracted from git. It runs with the installed dependencies of this version.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from tarfile import TarFile
from typing import Any

ROOT = Path(__file__).parents[2]
# The last commit before the modules, classes and functions were renamed. State has format 1.
COMMIT = "f4dd927b20f666f360e6c15770f23f07f0916618"
PACKAGES = ("proxy", "adapters")
UNISONO = str(Path(sys.executable).with_name("unisono"))


def has_commit() -> bool:
    """Return True if this clone contains the earlier version."""
    try:
        command = ["git", "-C", str(ROOT), "cat-file", "-e", f"{COMMIT}^{{commit}}"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def extract(folder: Path) -> dict[str, str]:
    """Extract the earlier version into `folder`, and return the environment that selects it."""
    command = ["git", "-C", str(ROOT), "archive", COMMIT, "pyproject.toml", *PACKAGES]
    packed = subprocess.run(command, capture_output=True, check=True).stdout
    with TarFile(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    paths = [folder / package for package in PACKAGES]
    _write_metadata(paths[0], tomllib.loads((folder / "pyproject.toml").read_text())["project"])
    # These paths precede the installed version, and bytecode is written into `folder`.
    environment = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    _check(environment, paths[0])
    return environment


def _check(environment: dict[str, str], folder: Path) -> None:
    """Raise AssertionError if the environment does not select the earlier version."""
    command = [sys.executable, "-P", "-c", "import unisono; print(unisono.__file__)"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    assert Path(result.stdout.strip()).is_relative_to(folder), result.stdout


def _write_metadata(folder: Path, project: dict[str, Any]) -> None:
    """Write the entry points of the earlier version.

    The first distribution on the path hides the installed one.
    """
    about = folder / f"unisono-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: unisono\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    sections = [[f"[{group}]", *(f"{name} = {target}" for name, target in found.items())] for group, found in groups]
    (about / "entry_points.txt").write_text("\n".join(line for section in sections for line in section) + "\n")


def command_output(environment: dict[str, str], arguments: Sequence[str]) -> str:
    """Run a command of `unisono` and return its standard output."""
    command = [UNISONO, *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
