"""Public names must not disappear.

They are routes, fields, settings, commands, metrics, error codes, and names for hooks and adapters.
"""

from __future__ import annotations

import pytest

from tests.docs.public_names import COMMAND, GOLDEN, missing, public_names


@pytest.fixture(scope="module")
def recorded() -> list[str]:
    return GOLDEN.read_text().splitlines()


@pytest.fixture(scope="module")
def current() -> frozenset[str]:
    return frozenset(public_names())


def test_no_public_name_disappears(recorded: list[str], current: frozenset[str]) -> None:
    """A client, a configuration or a dashboard may use it. Restore it, or keep it as an alias."""
    assert missing(recorded, current) == []


def test_every_public_name_is_recorded(recorded: list[str], current: frozenset[str]) -> None:
    assert sorted(current - set(recorded)) == [], COMMAND


def test_every_kind_of_name_is_recorded(recorded: list[str]) -> None:
    kinds = {
        *("route ", "parameter ", "request field ", "response field ", "response header ", "config ", "backend kind "),
        *("command ", "metric ", "error ", "recovery ", "extra ", "entry point ", "header ", "environment ", "import "),
        "log extra ",
    }
    assert {kind for kind in kinds if sum(name.startswith(kind) for name in recorded) < 4} == set()
