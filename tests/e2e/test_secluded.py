"""What needs a network of its own: names that mean other places each time, and places inside that must not be reached.
The checks run in namespaces of their own, which takes a system that permits them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).with_name("secluded")
ALONE = ("unshare", "--net", "--mount", "--propagation", "private")


def _permitted() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not _permitted(), reason="network and mount namespaces need Linux, root and iproute2")
def test_nothing_inside_is_reached_whatever_names_and_redirects_say() -> None:
    checks = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(HERE / "check_reach.py")]
    done = subprocess.run(
        [*ALONE, *checks], cwd=HERE.parents[2], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
