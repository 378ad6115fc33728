"""Tests of splitting a stream into lines of JSON, for any packet boundaries."""

from __future__ import annotations

import pytest

from unisono_adapters._framing import MAX_LINE_BYTES, EventTooLong, LineCutter

STREAM = '{"a": "é"}\n\r\n{"b": "\U0001f642"}\r\n\n{"c": 3}\n{"d": 4}'.encode()
LINES = ['{"a": "é"}'.encode(), '{"b": "\U0001f642"}'.encode(), b'{"c": 3}', b'{"d": 4}']


@pytest.mark.parametrize("size", range(1, len(STREAM) + 1))
def test_lines_are_independent_of_packet_boundaries(size: int) -> None:
    cutter = LineCutter()
    lines = [line for i in range(0, len(STREAM), size) for line in cutter.feed(STREAM[i : i + size])]
    assert [*lines, *cutter.end()] == LINES
    assert cutter.end() == []


def test_endless_line_raises_event_too_long() -> None:
    cutter = LineCutter()
    assert cutter.feed(b"x" * MAX_LINE_BYTES) == []
    with pytest.raises(EventTooLong):
        cutter.feed(b"x")


def test_many_small_reads_of_one_line_take_linear_time() -> None:
    cutter = LineCutter()
    for _ in range(200_000):
        assert cutter.feed(b"x") == []
    assert cutter.feed(b"\n") == [b"x" * 200_000]
