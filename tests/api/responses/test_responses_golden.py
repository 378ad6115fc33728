"""The events that the official SDKs are shown are those the gateway makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest

from tests.api.responses import golden
from tests.api.responses.folding import Event


@pytest.mark.parametrize(
    ("path", "made"), [(golden.EVENTS, golden.events), (golden.ITEMS, golden.items)], ids=["events", "items"]
)
def test_the_wire_is_what_it_was(path: Path, made: Callable[[], Iterator[Event]]) -> None:
    kept = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert kept == list(made())
