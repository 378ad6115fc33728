"""Hosts that are this machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from unisono.net.special_addresses import is_loopback

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "proxy").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")])

LOOPBACK = ("127.0.0.1", "127.9.9.9", "::1", "localhost")
REACHABLE = ("0.0.0.0", "::", "10.0.0.1", "example.com", "localhost.example", "127.0.0.1.example.com", "127.1", "")


@pytest.mark.parametrize(
    ("host", "expected"), [*((host, True) for host in LOOPBACK), *((host, False) for host in REACHABLE)]
)
def test_loopback_hosts_are_recognized(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_only_one_function_decides_which_host_is_this_machine() -> None:
    """Otherwise a check of one command or listener accepts a spelling that another refuses."""
    deciding = [path.name for path in SOURCES if re.search(r"\)\.is_loopback\b", path.read_text())]
    assert deciding == ["special_addresses.py"]
