"""Export of the metrics to an OpenTelemetry collector, in a separate thread.

The exported values are those of the Prometheus metrics. A metric that OpenTelemetry's conventions for generative AI
define is exported under the name in these conventions. Each worker is an instance of the service
and exports its own values.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import pairwise
from math import inf
from time import time_ns
from typing import Any, Final
from uuid import uuid4

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

from unisono.core.frozen import dataclass
from unisono.observe.genai_metrics import LABEL_NAMES, METRIC_NAMES

# Maximum time in seconds for which the shutdown waits for the last export.
CLOSING_S: Final = 3.0
# Units in OpenTelemetry's notation, by the suffix of the metric's name.
UNITS: Final = {"_seconds": "s", "_bytes": "By", "_tokens": "{token}", "_token_usage": "{token}"}
BUCKET: Final = "_bucket"

log = logging.getLogger("unisono.metrics")


@dataclass(frozen=True, slots=True)
class MetricExportOptions:
    """Destination of the metrics.

    `endpoint` is the collector's full URL for metrics. If it is None, the OpenTelemetry library reads its own
    environment variables.
    """

    endpoint: str | None
    service: str
    version: str
    timeout_s: float
    interval_s: float
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


class MetricsExporter:
    """Exporter of the metrics that `collect` returns; `count` is called with each outcome."""

    def __init__(
        self, options: MetricExportOptions, collect: Callable[[], Iterable[Family]], count: Callable[[str, int], None]
    ) -> None:
        self._exporter = OTLPMetricExporter(
            endpoint=options.endpoint, headers=dict(options.headers) or None, timeout=options.timeout_s
        )
        names = {"service.name": options.service, "service.version": options.version}
        self._resource = Resource.create({**names, "service.instance.id": str(uuid4())})
        self._scope = InstrumentationScope("unisono", options.version)
        self._interval_s = options.interval_s
        self._collect = collect
        self._count = count
        self._started_ns = time_ns()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._export_regularly, name="metrics export", daemon=True)

    async def start(self) -> None:
        self._thread.start()

    async def aclose(self) -> None:
        """Export the last values, but give up after a short timeout."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSING_S)
        self._exporter.shutdown()

    def _export_regularly(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._export()
        self._export()

    def _export(self) -> None:
        try:
            metrics = [*to_metrics(self._collect(), self._started_ns, time_ns())]
            scope = ScopeMetrics(self._scope, metrics, "")
            data = MetricsData([ResourceMetrics(self._resource, [scope], "")])
            is_exported = self._exporter.export(data) is MetricExportResult.SUCCESS
        except Exception as error:
            log.exception("metrics could not be exported", exc_info=error)
            is_exported = False
        self._count("exported" if is_exported else "failed", 1)


def to_metrics(families: Iterable[Family], started_ns: int, now_ns: int) -> Iterator[Metric]:
    """Convert Prometheus metrics to OpenTelemetry metrics.

    Counting began at `started_ns`; the values are those at `now_ns`. Both are Unix times in nanoseconds. Metrics
    without values are skipped.
    """
    cumulative = AggregationTemporality.CUMULATIVE
    for family in families:
        data: Sum | Gauge | Histogram
        match family.type:
            case "counter":
                data = Sum(_numbers(family.samples, started_ns, now_ns), cumulative, is_monotonic=True)
            case "gauge":
                data = Gauge(_numbers(family.samples, started_ns, now_ns))
            case "histogram":
                data = Histogram([*_histograms(family.samples, started_ns, now_ns)], cumulative)
            case _:
                continue
        if data.data_points:
            unit = next((unit for ending, unit in UNITS.items() if family.name.endswith(ending)), "")
            yield Metric(METRIC_NAMES.get(family.name, family.name), family.documentation, unit, data)


def _numbers(samples: Sequence[Sample], started_ns: int, now_ns: int) -> list[NumberDataPoint]:
    return [NumberDataPoint(_attributes(each.labels), started_ns, now_ns, each.value) for each in samples]


def _histograms(samples: Iterable[Sample], started_ns: int, now_ns: int) -> Iterator[HistogramDataPoint]:
    """Yield one data point per series.

    The Prometheus library lists the buckets of a series, then its count and its sum.
    """
    buckets: list[tuple[float, float]] = []
    count = 0
    for sample in samples:
        if sample.name.endswith(BUCKET):
            buckets.append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_count"):
            count = round(sample.value)
        elif sample.name.endswith("_sum"):
            # Buckets are cumulative in Prometheus.
            totals = [0, *(round(value) for _, value in buckets)]
            # Minimum and maximum are unknown.
            unknown: Any = None
            yield HistogramDataPoint(
                _attributes(sample.labels),
                started_ns,
                now_ns,
                count,
                sample.value,
                [after - before for before, after in pairwise(totals)],
                [bound for bound, _ in buckets if bound != inf],
                unknown,
                unknown,
            )
            buckets = []


def _attributes(labels: Mapping[str, str]) -> dict[str, str]:
    # A label with an empty value becomes no attribute.
    return {LABEL_NAMES.get(name, name): value for name, value in labels.items() if value}
