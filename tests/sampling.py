"""Selection of the test cases that `make test` runs. The other cases are marked as slow."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence

import pytest

# End-to-end tests that combine whole and streamed answers with another parameter run one case in three.
STREAMED_ONE_IN = 3
# Folders whose tests start servers or applications. In these folders, tests with at least MANY_CASES cases run half of
# their cases.
SLOW_FOLDERS = frozenset({"adapters", "api", "cli", "contract", "e2e", "engine", "mcp", "passthrough", "store", "web"})
MANY_CASES = 4


def mark_sampled(items: Sequence[pytest.Item], one_in: int = 1) -> None:
    """Mark the cases of parametrised tests as slow, except one case in n.

    n is the number in the marker `sampled`. For parametrised tests without this marker, n is at least `one_in`.
    """
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if getattr(item, "callspec", None) is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        # In the order of a checksum: every n-th case would always have the same value of one parameter.
        group.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in group[-(-len(group) // _one_in(group, one_in)) :]:
            item.add_marker(pytest.mark.slow)


def _one_in(group: Sequence[pytest.Item], default: int) -> int:
    item = group[0]
    if mark := item.get_closest_marker("sampled"):
        return int(mark.kwargs["one_in"])
    parameters: dict[str, object] = item.callspec.params  # type: ignore[attr-defined]
    if "e2e" in item.path.parts and "stream" in parameters and len(parameters) > 1:
        return max(default, STREAMED_ONE_IN)
    return max(default, 2 if len(group) >= MANY_CASES and not SLOW_FOLDERS.isdisjoint(item.path.parts) else 1)
