"""The golden files that the suites of the official SDKs read match the gateway's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest

from tests.api.responses import golden
from tests.api.responses.folding import Event


@pytest.mark.parametrize(
    ("path", "generate"), [(golden.EVENTS, golden.events), (golden.ITEMS, golden.items)], ids=["events", "items"]
)
def test_the_wire_format_matches_the_golden_file(path: Path, generate: Callable[[], Iterator[Event]]) -> None:
    expected = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert expected == list(generate())
