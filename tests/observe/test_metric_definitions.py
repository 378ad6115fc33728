"""Metrics export the same text as the library's own metrics."""

from __future__ import annotations

import pytest
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
    values,
)

from unisono.observe.metric_definitions import KnownCounter, KnownGauge, KnownHistogram, share_values

# As in `Instruments`.
disable_created_metrics()  # type: ignore[no-untyped-call]

BOUNDS = (0.5, 1.0, 2.5)
AMOUNTS = (-1.0, 0.0, 0.5, 0.6, 1.0, 2.5, 2.6, 1e9)


def test_a_histogram_exports_what_the_library_exports() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    known = KnownHistogram("wait", "Wait.", ("model", "backend"), registry=ours, buckets=BOUNDS)
    library = Histogram("wait", "Wait.", ("model", "backend"), registry=theirs, buckets=BOUNDS)
    for amount in AMOUNTS:
        known.series["m", 'b"1'].observe(amount)
        library.labels("m", 'b"1').observe(amount)
    known.series["m", "unused"]
    library.labels("m", "unused")
    assert generate_latest(ours) == generate_latest(theirs)


def test_a_histogram_without_labels_exports_added_counts_like_observations() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    known = KnownHistogram("wait", "Wait.", registry=ours, buckets=BOUNDS)
    library = Histogram("wait", "Wait.", registry=theirs, buckets=BOUNDS)
    known.observe(0.75)
    known.add([1, 0, 2, 1], 8.0)
    for amount in (0.75, 0.5, 2.0, 2.0, 3.5):
        library.observe(amount)
    assert generate_latest(ours) == generate_latest(theirs)
    with pytest.raises(ValueError, match="number of buckets"):
        known.add([1], 1.0)


def test_a_counter_and_a_gauge_export_what_the_library_exports() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    known, library = KnownCounter("n", "N.", ("a",), registry=ours), Counter("n", "N.", ("a",), registry=theirs)
    level, library_level = KnownGauge("g", "G.", ("a",), registry=ours), Gauge("g", "G.", ("a",), registry=theirs)
    for counters in ((known.series["x"], known.series["new"]), (library.labels("x"), library.labels("new"))):
        counters[0].inc()
        counters[0].inc(2.5)
        counters[1].inc(0)
    for gauge in (level.series["x"], library_level.labels("x")):
        gauge.inc(3)
        gauge.dec()
    assert generate_latest(ours) == generate_latest(theirs)
    with pytest.raises(ValueError, match="decrease"):
        known.series["x"].inc(-1)


def test_a_series_is_created_once() -> None:
    known = KnownCounter("n", "N.", ("a",), registry=CollectorRegistry())
    assert known.series["x"] is known.series["x"] is known.series["x",] is known.labels("x")


def test_workers_store_the_values_in_files(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(values, "ValueClass", values.MutexValue)
    share_values(0)
    texts = []
    # The second registry continues the files of the first one, as after the restart of a worker.
    for amount in (0.75, 2.0):
        registry = CollectorRegistry()
        known = KnownHistogram("wait", "Wait.", ("model",), registry=registry, buckets=BOUNDS)
        known.series["m"].observe(amount)
        known.series["m"].add([0, 0, 0, 1], 4.0)
        texts.append(generate_latest(registry).decode())
    assert 'wait_count{model="m"} 2.0' in texts[0]
    assert 'wait_count{model="m"} 4.0' in texts[1]
    assert 'wait_sum{model="m"} 10.75' in texts[1]
