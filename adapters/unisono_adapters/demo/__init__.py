"""Demo model: a tiny gpt-oss model, included in this package, that generates Harmony.

With it, `unisono serve` works on a machine without a model, and tests can use a real engine. `expand` unpacks the
model to an ordinary model folder (config, safetensors, tokenizer) that any engine can load. The folder appears
atomically, and concurrent processes share the same folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKED = Path(__file__).parent / "tiny_gpt_oss.packed"
# Formats of the expert weights: `mxfp4` as in released models, `bf16` for engines that cannot use mxfp4 on a CPU.
LAYOUTS = ("mxfp4", "bf16")

_STAMP = "unisono-demo.txt"
# Version of the expanded files; increase it to invalidate cached folders.
_FORMAT = 1

_NEEDED = ("numpy", "tokenizers", "mlx", "mlx_lm")


class DemoError(Exception):
    """Demo model cannot be expanded."""


def available() -> str | None:
    """Return None if the demo model can run here, else the reason and what to install.

    The check is fast, because it only looks for the packages and does not import them.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if not missing:
        return None
    return f"the demo model needs {', '.join(missing)}: pip install 'mlx[cpu]' mlx-lm huggingface-hub numpy tokenizers"


def default_folder() -> Path:
    """Return the folder for the expanded model in the user's cache.

    The name of the folder contains a digest of the packed file.
    """
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "unisono" / f"demo-{_digest()}"


def expand(target: Path, layout: str = "mxfp4") -> Path:
    """Expand the demo model into the folder `target` and return `target`.

    Does nothing if the folder already contains the model in this layout. Otherwise it takes seconds of CPU time and 80
    MB of disk space, so call it in a thread or another process. Needs numpy. Raises ValueError if the layout is
    unknown, DemoError if `target` contains anything else, and OSError if `target` cannot be written.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, not {layout!r}")
    stamp = f"{_digest()} {layout}\n"
    if _is_current(target, stamp):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target):
        if _is_current(target, stamp):
            return target
        _write(target, layout, stamp)
    return target


def _write(target: Path, layout: str, stamp: str) -> None:
    from unisono_adapters.demo.tokenizer import write_tokenizer
    from unisono_adapters.demo.weights import write_model

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DemoError(f"{target} exists and is not the demo model in {layout} layout; name an unused folder")
    unfinished = f".{target.name}.new-"
    for leftover in target.parent.glob(f"{unfinished}*"):  # left by a killed process, since this one holds the lock
        shutil.rmtree(leftover, ignore_errors=True)
    draft = Path(tempfile.mkdtemp(prefix=unfinished, dir=target.parent))
    try:
        write_tokenizer(draft)
        write_model(PACKED, draft, layout)
        (draft / _STAMP).write_text(stamp)
        draft.chmod(0o755)
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _is_current(target: Path, stamp: str) -> bool:
    try:
        return (target / _STAMP).read_text() == stamp
    except (FileNotFoundError, NotADirectoryError):
        return False


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, even if the process is killed
        yield


@cache
def _digest() -> str:
    return hashlib.sha256(b"%d\n" % _FORMAT + PACKED.read_bytes()).hexdigest()[:12]
