"""Verdict of a soak test: growth and leaked descriptors fail it, noise does not."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.soak.measure import MAX_BYTES_PER_REQUEST, Sample, judge

MB = 1024 * 1024
# Requests between two samples.
PER_SAMPLE = 120


def samples(bytes_per_request: float, noise: int, count: int = 600) -> list[Sample]:
    dice = Random(3)
    start = Sample(0.0, 0, 0, 0, 120 * MB, 120 * MB, 120 * MB, 20, 9, 0.0, 16, 100_000, {}, {})
    return [
        replace(
            start,
            requests=requests,
            allocated=round(start.allocated + requests * bytes_per_request + dice.gauss(0, noise)),
        )
        for requests in range(0, count * PER_SAMPLE, PER_SAMPLE)
    ]


@pytest.mark.parametrize(
    ("bytes_per_request", "noise", "count", "fault"),
    [
        (0.0, MB, 600, ""),
        (MAX_BYTES_PER_REQUEST / 4, MB, 600, ""),
        (600.0, MB, 600, "memory grows"),
        (0.0, 40 * MB, 40, "run for longer"),
        (0.0, 0, 8, "run for longer"),
    ],
)
def test_growth_fails_and_noise_does_not(bytes_per_request: float, noise: int, count: int, fault: str) -> None:
    found = samples(bytes_per_request, noise, count)
    faults = judge(found, found[0]).faults
    assert [fault in each for each in faults] == ([True] if fault else [])


@pytest.mark.parametrize("name", ["descriptors", "threads", "tasks"])
def test_a_figure_that_does_not_return_to_the_baseline_fails(name: str) -> None:
    found = samples(0.0, MB)
    end = replace(found[-1], **{name: getattr(found[0], name) + 7})
    [fault] = judge([*found, end], found[0]).faults
    assert fault.startswith(name)


def test_a_process_that_grows_by_fragmentation_alone_fails() -> None:
    found = samples(0.0, 0)
    grown = [replace(each, uss=each.uss + at * MB // 10) for at, each in enumerate(found)]
    [fault] = judge(grown, grown[0]).faults
    assert fault.startswith("the process grows")
