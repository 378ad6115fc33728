"""Sampling of parametrised cases: `make test` runs at least one quick case of every test that has one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sampling import mark_sampled


class Case:
    """Case of a parametrised test, with the attributes that `mark_sampled` uses."""

    def __init__(self, name: str, parameters: Mapping[str, object], *, folder: str, is_slow: bool = False) -> None:
        self.nodeid = f"tests/{folder}/test_it.py::test_it[{name}]"
        self.path = Path("tests") / folder / "test_it.py"
        self.callspec = SimpleNamespace(params=parameters)
        self.is_slow = is_slow

    def get_closest_marker(self, name: str) -> object | None:
        return name if name == "slow" and self.is_slow else None

    def add_marker(self, marker: pytest.MarkDecorator) -> None:
        assert marker.name == "slow"
        self.is_slow = True


def quick(cases: list[Any]) -> int:
    mark_sampled(cases)
    return sum(not case.is_slow for case in cases)


# Folder, number of cases, and number of cases that `make test` runs.
SIZES = {
    "few": ("e2e", 3, 3),
    "several": ("e2e", 5, 3),
    "many": ("e2e", 8, 3),
    "without servers": ("harmony", 8, 8),
}


@pytest.mark.parametrize(("folder", "cases", "expected"), SIZES.values(), ids=SIZES)
def test_large_tests_run_a_part_of_their_cases(folder: str, cases: int, expected: int) -> None:
    assert quick([Case(str(number), {"number": number}, folder=folder) for number in range(cases)]) == expected


def test_an_end_to_end_test_runs_with_one_store() -> None:
    assert quick([Case(store, {"store": store}, folder="e2e") for store in ("redis", "sqlite")]) == 1
    assert quick([Case(store, {"store": store}, folder="contract") for store in ("redis", "sqlite")]) == 2


@pytest.mark.parametrize("slow", range(4))
def test_a_quick_case_remains_if_others_are_slow_anyway(slow: int) -> None:
    cases = [Case(str(number), {"number": number}, folder="e2e", is_slow=number != slow) for number in range(4)]
    assert quick(cases) == 1
