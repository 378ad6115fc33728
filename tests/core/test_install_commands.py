"""Hints about missing packages must work where this distribution is on no index."""

from __future__ import annotations

from importlib.metadata import metadata
from pathlib import Path

import pytest

from unisono.core.install_commands import install_command

EXTRAS = metadata("unisono").get_all("Provides-Extra") or []
SOURCES = [path for folder in ("proxy", "adapters") for path in Path(folder).rglob("*.py")]


@pytest.mark.parametrize("extra", EXTRAS)
def test_command_names_the_packages_of_the_extra(extra: str) -> None:
    command = install_command(extra)
    assert command.startswith("pip install '") or extra == "sandbox"  # has packages for Linux only
    assert "unisono" not in command


def test_an_unknown_extra_has_no_command() -> None:
    assert "pip" not in install_command("none")


def test_no_hint_installs_a_package_named_like_this_one() -> None:
    assert len(SOURCES) > 100
    assert [path for path in SOURCES if "pip install 'unisono" in path.read_text()] == []
