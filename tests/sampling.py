"""Selection of the test cases that `make test` runs. The other cases are marked as slow."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence

import pytest

# End-to-end tests that combine whole and streamed answers with another parameter run one case in three.
STREAMED_ONE_IN = 3
# End-to-end tests for several kinds of stores run with one of them, because the contract tests compare the stores.
STORES = frozenset({"file", "redis", "sqlite"})
# Folders whose tests start servers or applications. In these folders, tests with many cases run one case in n.
SLOW_FOLDERS = frozenset({"adapters", "api", "cli", "contract", "e2e", "engine", "mcp", "passthrough", "store", "web"})
# Minimum number of cases, and n.
ONE_IN = ((8, 3), (4, 2))


def mark_sampled(items: Sequence[pytest.Item], one_in: int = 1) -> None:
    """Mark the cases of parametrised tests as slow, except one case in n.

    n is the number in the marker `sampled`. For parametrised tests without this marker, n is at least `one_in`.
    """
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        # Cases that are marked as slow already do not count, so that one of the other cases remains quick.
        if getattr(item, "callspec", None) is not None and item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        # In the order of a checksum: every n-th case would always have the same value of one parameter.
        group.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in group[-(-len(group) // _one_in(group, one_in)) :]:
            item.add_marker(pytest.mark.slow)


def _stores(group: Sequence[pytest.Item]) -> int:
    """Return the number of stores with which a test runs."""
    values = {value for item in group for value in item.callspec.params.values() if isinstance(value, str)}  # type: ignore[attr-defined]
    return len(values & STORES)


def _one_in(group: Sequence[pytest.Item], default: int) -> int:
    item = group[0]
    if mark := item.get_closest_marker("sampled"):
        return int(mark.kwargs["one_in"])
    parameters: dict[str, object] = item.callspec.params  # type: ignore[attr-defined]
    if "e2e" in item.path.parts:
        if "stream" in parameters and len(parameters) > 1:
            return max(default, STREAMED_ONE_IN)
        default = max(default, _stores(group))
    if SLOW_FOLDERS.isdisjoint(item.path.parts):
        return default
    return max(default, next((one_in for least, one_in in ONE_IN if len(group) >= least), 1))
