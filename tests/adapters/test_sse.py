"""Tests of parsing server-sent events, for any packet boundaries."""

from __future__ import annotations

import itertools
from time import perf_counter

import pytest

from unisono_adapters._framing import MAX_LINE_BYTES, EventCutter, EventTooLong

STREAMS: dict[str, tuple[bytes, list[bytes]]] = {
    "two events": (b"data: a\n\ndata: b\n\n", [b"a", b"b"]),
    "no space": (b"data:a\n\n", [b"a"]),
    "two spaces": (b"data:  a\n\n", [b" a"]),
    "CRLF": (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
    "CR": (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
    "mixed": (b"data: a\r\n\ndata: b\n\rdata: c\r\n\r", [b"a", b"b", b"c"]),
    "CRLF followed by empty lines": (b"data: a\r\n\r\n\n\ndata: b\n\n", [b"a", b"b"]),
    "several data lines": (b"data: a\ndata: b\ndata\n\n", [b"a\nb\n"]),
    "an empty data line": (b"data: \nx\n\ndata: \ndata: y\n\n", [b"", b"\ny"]),
    "comments": (b": keepalive 1/2\n\ndata: a\n: x\n\n:\n\n", [b"a"]),
    "comments in an event": (b": a\n: b\ndata: a\n:\n: c\ndata: : b\n: d\n\n: e\n: f", [b"a\n: b"]),
    "other fields": (b"event: e\nid: 7\nretry: 1\nfoo\ndata: a\ndatum: b\n\n", [b"a"]),
    "byte order mark": (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
    "byte order mark before a comment": (b"\xef\xbb\xbf: c\ndata: a\n: d\n\n", [b"a"]),
    "byte order mark before comments of its line": (b"\xef\xbb\xbfdata: a\n: c\n: d\n\n", [b"a"]),
    "byte order mark behind a comment": (b": c\n\xef\xbb\xbfdata: a\n\ndata: b\n\n", [b"b"]),
    "byte order mark behind an event": (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [b"a"]),
    "multi-byte characters": ("data: 👩‍👩‍👧 é\n\n".encode(), ["👩‍👩‍👧 é".encode()]),
    "last event without a blank line": (b"data: a\n\ndata: [DONE]", [b"a", b"[DONE]"]),
    "empty": (b"", []),
    "blank lines": (b"\n\n\n\r\n", []),
}


def parse(stream: bytes, *positions: int) -> list[bytes]:
    cutter = EventCutter()
    edges = [0, *positions, len(stream)]
    events = [event for start, end in itertools.pairwise(edges) for event in cutter.feed(stream[start:end])]
    return events + cutter.end()


@pytest.mark.parametrize(("stream", "events"), STREAMS.values(), ids=STREAMS)
def test_events_are_independent_of_packet_boundaries(stream: bytes, events: list[bytes]) -> None:
    assert parse(stream) == events
    assert parse(stream, *range(1, len(stream))) == events
    for positions in itertools.combinations(range(len(stream) + 1), 2):
        assert parse(stream, *positions) == events


def test_event_is_returned_by_the_read_that_completes_it() -> None:
    cutter = EventCutter()
    assert cutter.feed(b"data: a\n") == []
    assert cutter.feed(b"\ndata: b") == [b"a"]
    assert cutter.feed(b"\n\ndata: c\n\n") == [b"b", b"c"]


ENDLESS = {
    "one line": itertools.repeat(b"x" * 65536),
    "one event": itertools.repeat(b"data: " + b"x" * 65536 + b"\n"),
    "small reads of one line": itertools.repeat(b"xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx" * 10),
}


@pytest.mark.parametrize("reads", ENDLESS.values(), ids=ENDLESS)
def test_endless_event_is_refused_in_linear_time(reads: itertools.repeat[bytes]) -> None:
    cutter = EventCutter()
    fed = 0
    started = perf_counter()
    for read in reads:
        fed += len(read)
        try:
            assert cutter.feed(read) == []
        except EventTooLong:
            break
    assert MAX_LINE_BYTES * 0.9 < fed < MAX_LINE_BYTES * 1.1
    assert perf_counter() - started < 2


COMMENTS: dict[str, tuple[bytes, int]] = {
    "whole": (b": ping\n" * 8192, 57344),
    "cut": (b": ping\n" * 8192, 1001),
    "CRLF": (b": ping\r\n" * 8192, 999),
    "one long comment": (b": " + b"x" * 65534, 65536),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("comments", "size"), COMMENTS.values(), ids=COMMENTS)
@pytest.mark.parametrize("before", [b"", b"data: a\n", b"event: token\ndata: a\n"])
def test_comments_of_a_waiting_server_do_not_count_towards_the_size_of_an_event(
    before: bytes, comments: bytes, size: int
) -> None:
    cutter = EventCutter()
    cutter.feed(before)
    for _ in range(2 * MAX_LINE_BYTES // len(comments)):
        for at in range(0, len(comments), size):
            assert cutter.feed(comments[at : at + size]) == []
    assert cutter.feed(b"\n\ndata: b\n\n") == ([b"a", b"b"] if before else [b"b"])
