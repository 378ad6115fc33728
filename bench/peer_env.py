"""Separate environments for other gateways, as pinned in `litellm.txt` and `smg.txt`.

Each is installed on first use; later runs need no network. Their dependencies are separate from those
of the gateway.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from bench.processes import StartError

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent


def program(name: str) -> Path:
    """Return the command of the package `name`, installed as pinned. Raises StartError."""
    pins_file, env = FOLDER / f"{name}.txt", ROOT / ".envs" / name
    # Contains the installed pins, once the installation is complete.
    installed = env / ".installed"
    pins = f"{sys.version}\n{pins_file.read_text()}"
    if not installed.exists() or installed.read_text() != pins:
        print(f"installing {name} into .envs/{name}", file=sys.stderr)
        python = str(env / "bin" / "python")
        _uv("venv", "--clear", "--python", sys.executable, str(env))
        # Compile now, so that the first start takes as long as later ones.
        _uv("pip", "sync", "--compile-bytecode", "--python", python, str(pins_file))
        installed.write_text(pins)
    return env / "bin" / name


def version(name: str) -> str:
    """Return the pinned version as `litellm 1.2.3`."""
    pins = (FOLDER / f"{name}.txt").read_text().splitlines()
    [pinned] = [line for line in pins if line.startswith(f"{name}==")]
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
