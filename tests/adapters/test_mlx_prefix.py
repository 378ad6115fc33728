"""The cache of computed prompts: what it hands out, to whom, and what it forgets."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from unisono_adapters.mlx.prefix import Prefixes


@dataclass(frozen=True)
class Layer:
    """Stands for one layer's keys and values by its size."""

    nbytes: int
    state: str = ""


def filled(*kept: tuple[str, list[int]], entries: int = 10, size: int = 1000) -> Prefixes:
    prefixes = Prefixes(entries, size)
    for salt, ids in kept:
        prefixes.keep(salt, ids, [Layer(100, f"{salt}{ids}")])
    return prefixes


CASES: dict[str, tuple[list[tuple[str, list[int]]], str, list[int], int]] = {
    "nothing kept": ([], "", [1, 2], 0),
    "a beginning": ([("", [1, 2])], "", [1, 2, 3], 2),
    "the longest of several": ([("", [1]), ("", [1, 2, 3]), ("", [1, 2])], "", [1, 2, 3, 4], 3),
    "all but the last id": ([("", [1, 2, 3])], "", [1, 2, 3], 0),
    "something else": ([("", [1, 9])], "", [1, 2, 3], 0),
    "longer than the prompt": ([("", [1, 2, 3, 4])], "", [1, 2, 3], 0),
    "another tenant's": ([("a", [1, 2])], "b", [1, 2, 3], 0),
    "its own among others'": ([("a", [1, 2]), ("b", [1])], "b", [1, 2, 3], 1),
}


@pytest.mark.parametrize(("kept", "salt", "prompt", "expected"), CASES.values(), ids=CASES)
def test_a_prompt_begins_with_the_longest_sequence_its_tenant_has(
    kept: list[tuple[str, list[int]]], salt: str, prompt: list[int], expected: int
) -> None:
    known, layers = filled(*kept).longest_prefix(salt, prompt)

    assert known == expected
    assert (layers is None) == (expected == 0)
    if layers is not None:
        assert layers[0].state == f"{salt}{prompt[:known]}"


def test_the_least_recently_used_goes_first() -> None:
    prefixes = filled(("", [1]), ("", [2]), entries=2)
    assert prefixes.longest_prefix("", [1, 0])[0] == 1
    prefixes.keep("", [3], [Layer(100)])

    assert [prefixes.longest_prefix("", [first, 0])[0] for first in (1, 2, 3)] == [1, 0, 1]


def test_bytes_are_bounded_also_when_an_entry_is_replaced() -> None:
    prefixes = filled(("", [1]), ("", [2]), size=250)
    prefixes.keep("", [2], [Layer(150)])
    assert [prefixes.longest_prefix("", [first, 0])[0] for first in (1, 2)] == [1, 1]
    prefixes.keep("", [3], [Layer(1)])
    assert [prefixes.longest_prefix("", [first, 0])[0] for first in (1, 2, 3)] == [0, 1, 1]


def test_an_entry_over_the_limit_is_not_kept_and_drives_nothing_out() -> None:
    prefixes = filled(("", [1]), size=150)
    prefixes.keep("", [2], [Layer(151)])

    assert [prefixes.longest_prefix("", [first, 0])[0] for first in (1, 2)] == [1, 0]


def test_clearing_forgets_everything() -> None:
    prefixes = filled(("", [1]), ("a", [1]))
    prefixes.clear()

    assert [prefixes.longest_prefix(salt, [1, 2]) for salt in ("", "a")] == [(0, None), (0, None)]
