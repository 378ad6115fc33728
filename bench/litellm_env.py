"""LiteLLM's proxy in an environment of its own, as pinned in `litellm.txt`: installed when it is first measured.

What it needs and what the gateway needs never meet, and a run never asks the network for anything once it is there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.processes import StartError

ROOT = Path(__file__).parents[1]
PINS = Path(__file__).parent / "litellm.txt"
ENV_FOLDER = ROOT / ".envs" / "litellm"
INSTALLED = ENV_FOLDER / ".installed"
"""Holds the pins that are installed, once all of them are."""


def program() -> Path:
    """The proxy's command, installed first where it is not there as pinned. Raises DidNotStart."""
    pins = f"{sys.version}\n{PINS.read_text()}"
    if not INSTALLED.exists() or INSTALLED.read_text() != pins:
        print("installing LiteLLM's proxy into .envs/litellm", file=sys.stderr)
        python = str(ENV_FOLDER / "bin" / "python")
        _uv("venv", "--clear", "--python", sys.executable, str(ENV_FOLDER))
        # Compiled now: what is compared is a start, not a first start.
        _uv("pip", "sync", "--compile-bytecode", "--python", python, str(PINS))
        INSTALLED.write_text(pins)
    return ENV_FOLDER / "bin" / "litellm"


def version() -> str:
    """What is pinned, as `litellm 1.2.3`."""
    [pinned] = [line for line in PINS.read_text().splitlines() if line.startswith("litellm==")]
    return pinned.replace("==", " ")


def _uv(*arguments: str) -> None:
    uv = shutil.which("uv") or str(ROOT / ".cache" / "uv" / "bin" / "uv")
    try:
        subprocess.run(
            [uv, *arguments, "--quiet"],
            env=os.environ | {"UV_PYTHON_DOWNLOADS": "never"},
            check=True,
            capture_output=True,
            text=True,
        )
    except OSError as error:
        raise StartError(f"uv is not here ({error}); `make bench` brings it along") from error
    except subprocess.CalledProcessError as error:
        raise StartError(f"uv {arguments[0]} failed:\n{error.stderr[-2000:]}") from error
