"""SSRF checks in separate namespaces: rebinding host names and private addresses.

They need a system that permits network and mount namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("secluded")
UNSHARE = ("unshare", "--net", "--mount", "--propagation", "private")


def _has_namespaces() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not _has_namespaces(), reason="network and mount namespaces need Linux, root and iproute2")
def test_private_addresses_are_unreachable_by_any_name_or_redirect() -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(FOLDER / "check_reach.py")]
    result = subprocess.run(
        [*UNSHARE, *command], cwd=FOLDER.parents[2], capture_output=True, text=True, timeout=110, check=False
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
