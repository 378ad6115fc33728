"""Parsed files of docker/: compose files, Dockerfile, and the manifests that Helm renders from the chart.

`rendered/` contains the rendered manifests, so that they are tested on machines without Helm. `python -m
tests.deployment.manifests` renders them again with Helm; a slow test compares them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
CHART = DOCKER / "helm" / "unisono"
# Environment of the tools that are locked in `tools`; a slow test installs it.
TOOLS = ROOT / ".envs" / "deployment"
RENDERED = Path(__file__).parent / "rendered"
COMPOSE = {path.name: yaml.safe_load(path.read_text()) for path in sorted(DOCKER.glob("compose*.yaml"))}
# Release name and additional Helm arguments of each rendering.
RENDERINGS: Mapping[str, list[str]] = {
    "default": ["unisono"],
    "everything": ["front", "--values", str(Path(__file__).parent / "everything.values.yaml")],
}


def helm() -> str:
    """Return the command of Helm, that of the machine or of the tests' tools. Raises FileNotFoundError."""
    found = shutil.which("helm") or shutil.which("helm", path=str(TOOLS / "bin"))
    if found is None:
        raise FileNotFoundError("helm is not installed, and has no package for this machine")
    return found


def render(name: str, *options: str) -> str:
    """Render the chart with Helm and the additional `options`.

    Raises FileNotFoundError if Helm is not installed, and CalledProcessError with its output if rendering fails.
    """
    release, *arguments = RENDERINGS[name]
    target = ["--namespace", "serving", "--kube-version", "1.31.0"]
    command = [helm(), "template", release, str(CHART), *target, *arguments, *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def manifests(text: str) -> dict[str, Any]:
    """Return the manifests of a YAML stream by kind; each kind must occur once."""
    documents = [document for document in yaml.safe_load_all(text) if document]
    assert len({document["kind"] for document in documents}) == len(documents)
    return {document["kind"]: document for document in documents}


def rendered(name: str) -> dict[str, Any]:
    return manifests((RENDERED / f"{name}.yaml").read_text())


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments."""
    text = re.sub(r"\\\n\s*", " ", (DOCKER / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def words_of(instruction: str) -> list[str]:
    """Return the JSON argument list of the last instruction of that name."""
    [*_, last] = [rest for word, rest in instructions() if word == instruction]
    words: list[str] = json.loads(last)
    return words


if __name__ == "__main__":
    RENDERED.mkdir(exist_ok=True)
    for each in RENDERINGS:
        (RENDERED / f"{each}.yaml").write_text(render(each))
    sys.stdout.write("rendered\n")
