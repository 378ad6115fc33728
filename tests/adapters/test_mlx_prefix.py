"""Tests of the prefix cache: longest prefix, tenant isolation and eviction."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from unisono_adapters.mlx.prefix import Prefixes


@dataclass(frozen=True)
class Layer:
    """Placeholder for the keys and values of one layer, with a size."""

    nbytes: int
    state: str = ""


def filled(*sequences: tuple[str, list[int]], entries: int = 10, size: int = 1000) -> Prefixes:
    prefixes = Prefixes(entries, size)
    for salt, ids in sequences:
        prefixes.keep(salt, ids, [Layer(100, f"{salt}{ids}")])
    return prefixes


CASES: dict[str, tuple[list[tuple[str, list[int]]], str, list[int], int]] = {
    "empty cache": ([], "", [1, 2], 0),
    "prefix": ([("", [1, 2])], "", [1, 2, 3], 2),
    "longest of several": ([("", [1]), ("", [1, 2, 3]), ("", [1, 2])], "", [1, 2, 3, 4], 3),
    "whole prompt cached": ([("", [1, 2, 3])], "", [1, 2, 3], 0),
    "different sequence": ([("", [1, 9])], "", [1, 2, 3], 0),
    "longer than the prompt": ([("", [1, 2, 3, 4])], "", [1, 2, 3], 0),
    "other tenant": ([("a", [1, 2])], "b", [1, 2, 3], 0),
    "own entry among others": ([("a", [1, 2]), ("b", [1])], "b", [1, 2, 3], 1),
}


@pytest.mark.parametrize(("entries", "salt", "prompt", "expected"), CASES.values(), ids=CASES)
def test_longest_cached_prefix_of_the_tenant_is_returned(
    entries: list[tuple[str, list[int]]], salt: str, prompt: list[int], expected: int
) -> None:
    length, layers = filled(*entries).longest_prefix(salt, prompt)

    assert length == expected
    assert (layers is None) == (expected == 0)
    if layers is not None:
        assert layers[0].state == f"{salt}{prompt[:length]}"


def test_least_recently_used_entry_is_evicted_first() -> None:
    prefixes = filled(("", [1]), ("", [2]), entries=2)
    assert prefixes.longest_prefix("", [1, 0])[0] == 1
    prefixes.keep("", [3], [Layer(100)])

    assert [prefixes.longest_prefix("", [first, 0])[0] for first in (1, 2, 3)] == [1, 0, 1]


def test_size_limit_also_applies_when_an_entry_is_replaced() -> None:
    prefixes = filled(("", [1]), ("", [2]), size=250)
    prefixes.keep("", [2], [Layer(150)])
    assert [prefixes.longest_prefix("", [first, 0])[0] for first in (1, 2)] == [1, 1]
    prefixes.keep("", [3], [Layer(1)])
    assert [prefixes.longest_prefix("", [first, 0])[0] for first in (1, 2, 3)] == [0, 1, 1]


def test_oversized_entry_is_not_cached_and_evicts_nothing() -> None:
    prefixes = filled(("", [1]), size=150)
    prefixes.keep("", [2], [Layer(151)])

    assert [prefixes.longest_prefix("", [first, 0])[0] for first in (1, 2)] == [1, 0]


def test_clear_removes_every_entry() -> None:
    prefixes = filled(("", [1]), ("a", [1]))
    prefixes.clear()

    assert [prefixes.longest_prefix(salt, [1, 2]) for salt in ("", "a")] == [(0, None), (0, None)]
