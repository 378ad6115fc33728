"""Separate environment for LiteLLM's proxy, as pinned in `litellm.txt`.

It is installed at its first measurement, and later runs need no network. Its dependencies are separate from those of
the gateway.
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
# Contains the installed pins, once the installation is complete.
INSTALLED = ENV_FOLDER / ".installed"


def program() -> Path:
    """Return the command of the proxy, installed as pinned. Raises StartError."""
    pins = f"{sys.version}\n{PINS.read_text()}"
    if not INSTALLED.exists() or INSTALLED.read_text() != pins:
        print("installing LiteLLM's proxy into .envs/litellm", file=sys.stderr)
        python = str(ENV_FOLDER / "bin" / "python")
        _uv("venv", "--clear", "--python", sys.executable, str(ENV_FOLDER))
        # Compile now, so that the first start takes as long as later ones.
        _uv("pip", "sync", "--compile-bytecode", "--python", python, str(PINS))
        INSTALLED.write_text(pins)
    return ENV_FOLDER / "bin" / "litellm"


def version() -> str:
    """Return the pinned version as `litellm 1.2.3`."""
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
        raise StartError(f"uv is not installed ({error}); run `make bench`, which installs it") from error
    except subprocess.CalledProcessError as error:
        raise StartError(f"uv {arguments[0]} failed:\n{error.stderr[-2000:]}") from error
