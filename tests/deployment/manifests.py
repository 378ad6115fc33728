"""What is in docker/, read: the compose files, the image's recipe, and the chart as Helm renders it.

`rendered/` holds what Helm makes of the chart, so that all of it is looked at where there is no Helm; with one, `python
-m tests.deployment.manifests` renders it again and a slow test compares.
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
RENDERED = Path(__file__).parent / "rendered"
COMPOSE = {path.name: yaml.safe_load(path.read_text()) for path in sorted(DOCKER.glob("compose*.yaml"))}
RENDERINGS: Mapping[str, list[str]] = {
    "default": ["unisono"],
    "everything": ["front", "--values", str(Path(__file__).parent / "everything.values.yaml")],
}
"""By the name of a rendering: the release, and what else Helm is told."""


def render(name: str, *more: str) -> str:
    """What Helm makes of the chart now, told `more`. Raises FileNotFoundError where there is none, and
    CalledProcessError with its words where it refuses."""
    helm = shutil.which("helm")
    if helm is None:
        raise FileNotFoundError("helm is not installed")
    release, *usual = RENDERINGS[name]
    place = ["--namespace", "serving", "--kube-version", "1.31.0"]
    command = [helm, "template", release, str(CHART), *place, *usual, *more]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def manifests(text: str) -> dict[str, Any]:
    """By kind, of which there is one each."""
    documents = [document for document in yaml.safe_load_all(text) if document]
    assert len({document["kind"] for document in documents}) == len(documents)
    return {document["kind"]: document for document in documents}


def rendered(name: str) -> dict[str, Any]:
    return manifests((RENDERED / f"{name}.yaml").read_text())


def instructions() -> list[tuple[str, str]]:
    """The image's recipe: each instruction with what stands behind it."""
    text = re.sub(r"\\\n\s*", " ", (DOCKER / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def words_of(instruction: str) -> list[str]:
    """Of the last instruction of that name, in its JSON form."""
    [*_, last] = [rest for word, rest in instructions() if word == instruction]
    words: list[str] = json.loads(last)
    return words


if __name__ == "__main__":
    RENDERED.mkdir(exist_ok=True)
    for each in RENDERINGS:
        (RENDERED / f"{each}.yaml").write_text(render(each))
    sys.stdout.write("rendered\n")
