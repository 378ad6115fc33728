"""Commands that install the packages of an extra."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, requires
from typing import Final

DISTRIBUTION: Final = "unisono"
_PLATFORM: Final = re.compile(r"sys_platform == '(\w+)'")


def install_command(extra: str) -> str:
    """Return a command for `pip` that installs the packages of an extra.

    The command does not name this distribution, because a package index may lack it, or may offer a different
    distribution with the same name.
    """
    names = []
    try:
        requirements = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # the sources run without being installed
        requirements = []
    for requirement in requirements:
        name, _, marker = requirement.partition(";")
        platform = _PLATFORM.search(marker)
        if f"extra == '{extra}'" in marker.replace('"', "'") and (platform is None or platform[1] == sys.platform):
            names.append(f"'{name.strip()}'")
    return f"pip install {' '.join(names)}" if names else f"install the packages of the extra `{extra}`"
