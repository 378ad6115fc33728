"""Comparison of two checkouts: figures of a report, confidence interval of a ratio, table."""

from __future__ import annotations

from random import Random

import pytest

from bench.compare import figures_of, interval, table

REPORT = """
| | MiB |
| --- | ---: |
| unisono | 195 |

|  | CPU µs/token | tok/s |
| --- | ---: | ---: |
| unisono | 1,144.2 (1,100-1,200) | 300 |
| unisono, 6 streams | - | 12 |
"""


def test_figures_are_read_by_row_and_column() -> None:
    assert figures_of(REPORT, ("CPU µs/token",)) == {"unisono, CPU µs/token": 1144.2}


@pytest.mark.parametrize("change", [1.0, 1.1])
def test_the_interval_contains_the_change(change: float) -> None:
    rng = Random(5)
    ratio, low, high = interval([change * rng.lognormvariate(0, 0.05) for _ in range(40)])
    assert low < change < high
    assert low < ratio < high
    assert high / low < 1.1


def test_the_table_compares_paired_runs() -> None:
    [*_, row] = table([{"cost": 10.0}, {"cost": 20.0}, {"cost": 30.0}], [{"cost": 5.0}, {"cost": 10.0}, {"cost": 15.0}])
    assert row == "| cost | 20 | 10 | **0.500** | 0.500 to 0.500 |"
