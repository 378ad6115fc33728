"""Prometheus metrics by name, unit and labels, and the storage of their values.

Names contain units, such as seconds and tokens. Label values come only from the configuration and from tables in the
code, never from a request, so that clients cannot create series. If there are several workers, each worker stores its
values in files of its own. The files are in one folder, and their names contain the worker number. The worker that is
scraped sums the values of all workers. A restarted worker continues the files of its predecessor.
"""

from __future__ import annotations

import operator
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import Final, Self, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, values
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from unisono.core.answer_times import GAPS_S

AnyMetric = TypeVar("AnyMetric", bound=MetricWrapperBase)

# Environment variable in which the library finds the folder with the files of all workers.
FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"

SHORT_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
FIRST_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
WHOLE_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@cache
def share_values(place: int) -> None:
    """Store values where other workers can read them; `place` is the number of this worker.

    Call this function before the process creates any metric. Further calls have no effect,
    because a second class for the values would write to the same files.
    """
    values.ValueClass = values.MultiProcessValue(lambda: place)  # type: ignore[no-untyped-call]


class Series(dict[str | tuple[str, ...], AnyMetric]):
    """Labelled series of a metric by the values of their labels; a single value needs no tuple.

    A lookup in the library converts every label value to text and takes a lock; a lookup here does neither. The first
    lookup of a series creates it, and from then on the series is exported. The dictionary has one entry for each
    series.
    """

    def __init__(self, create: Callable[..., AnyMetric]) -> None:
        super().__init__()
        self._create = create

    def __missing__(self, labels: str | tuple[str, ...]) -> AnyMetric:
        values = (labels,) if isinstance(labels, str) else labels
        series = self[labels] = self._create(*values)
        return series


class KnownMetric(MetricWrapperBase):
    """Metric with a dictionary of its labelled series.

    The library checks at each count that the series has all of its labels. These metrics omit that check.
    """

    @cached_property
    def series(self) -> Series[Self]:
        return Series(self.labels)


class KnownCounter(KnownMetric, Counter):
    """Counter with a dictionary of its series.

    With one worker, a series keeps its number itself, without the library's lock: only one thread changes it, and a
    scrape in another thread reads it.
    """

    # None if the number is in a file that other workers read.
    _number: float | None = None

    def _metric_init(self) -> None:
        if values.ValueClass is values.MutexValue:
            self._number = 0.0
        else:
            super()._metric_init()

    def inc(self, amount: float = 1, exemplar: Mapping[str, str] | None = None) -> None:
        if amount < 0:
            raise ValueError("a counter cannot decrease")
        if self._number is not None:
            self._number += amount
        elif amount:
            self._value.inc(amount)

    def _child_samples(self) -> Iterable[Sample]:
        return super()._child_samples() if self._number is None else (Sample("_total", {}, self._number),)


class KnownGauge(KnownMetric, Gauge):
    """Gauge with a dictionary of its series."""

    def inc(self, amount: float = 1) -> None:
        self._value.inc(amount)

    def dec(self, amount: float = 1) -> None:
        self._value.inc(-amount)


class KnownHistogram(KnownMetric, Histogram):
    """Histogram with a dictionary of its series, which also accepts pre-aggregated counts.

    These counts must have the same bounds as the histogram. With one worker, a series stores its numbers itself, as in
    `KnownCounter`.
    """

    # Observations per bound; None if they are in files that other workers read.
    _counts: list[int] | None = None
    _total = 0.0

    def _metric_init(self) -> None:
        if values.ValueClass is values.MutexValue:
            self._counts = [0] * len(self._upper_bounds)
        else:
            super()._metric_init()

    def observe(self, amount: float, exemplar: Mapping[str, str] | None = None) -> None:
        place = bisect_left(self._upper_bounds, amount)
        if self._counts is not None:
            self._counts[place] += 1
            self._total += amount
        else:
            self._buckets[place].inc(1)
            self._sum.inc(amount)

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add one count for each bucket; `total` is the sum of the counted values.

        The last bucket is for values above the highest finite bound.
        """
        if len(counts) != len(self._upper_bounds):
            raise ValueError("the number of counts must equal the number of buckets")
        if self._counts is not None:
            self._counts = [*map(operator.add, self._counts, counts)]
            self._total += total
            return
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(total)

    def _child_samples(self) -> Iterable[Sample]:
        if self._counts is None:
            return super()._child_samples()
        bounds = map(floatToGoString, self._upper_bounds)
        sums = [*map(float, accumulate(self._counts))]
        return (
            *(Sample("_bucket", {"le": bound}, count) for bound, count in zip(bounds, sums, strict=True)),
            Sample("_count", {}, sums[-1]),
            Sample("_sum", {}, self._total),
        )


class Instruments:
    """Every metric of this process."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.build = self._gauge(
            "build_info", "Version of the gateway, as a label; the value is always 1.", "version", over="livemax"
        )
        self._define_http()
        self._define_requests()
        self._define_backends()
        self._define_quality()
        self._define_tools()
        self._define_owners()
        self._define_process()

    # Names and labels are public: dashboards and alerts use them. The library adds `_total` to the names of counters.
    # No label has values that clients can choose freely, because every value costs memory for ever.
    def _define_http(self) -> None:
        self.http = self._counter("http_requests", "HTTP requests, by route.", "route", "method", "status")
        self.notes = self._counter("notes", "Fields of requests that had no effect.", "field")
        self.http_s = self._histogram(
            "http_request_duration",
            "Time from a request's headers to the end of its response.",
            "route",
            bounds=WHOLE_S,
        )

    def _define_requests(self) -> None:
        request_labels = ("model", "surface")
        self.requests = self._counter(
            "requests", "Generation requests, by outcome.", *request_labels, "outcome", "error"
        )
        # A gauge is the sum over all workers, unless `over` selects another aggregation.
        self.in_flight = self._gauge("requests_in_flight", "Generation requests in progress.", "model")
        self.duration = self._histogram(
            "request_duration", "Time from a request to the end of its answer.", *request_labels, bounds=WHOLE_S
        )
        self.first = self._histogram(
            "time_to_first_token",
            "Time from a request to the first token of a backend.",
            *request_labels,
            bounds=FIRST_S,
        )
        self.queue = self._histogram(
            "request_queue_time", "Time that requests wait for a slot on a backend.", "model", bounds=FIRST_S
        )
        self.prompt = self._counter("prompt_tokens", "Prompt tokens of client requests.", "model")
        self.cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens of client requests that were in a backend's cache.", "model"
        )
        self.tokens = self._counter("generation_tokens", "Generated tokens, by channel.", "model", "channel")
        self.tool_output = self._counter("tool_output_tokens", "Tokens of server tool results in prompts.", "model")
        self.recoveries = self._counter("recoveries", "Recoveries from malformed output.", "rule", "model", "backend")
        self.unmet = self._counter("unmet_answers", "Answers without the required tool call or format.", "model")
        self.failovers = self._counter("failovers", "Failovers: answers continued on another backend.", "model")

    def _define_backends(self) -> None:
        backend = ("model", "backend")
        self.generations = self._counter(
            "backend_requests", "Generations sent to backends, by outcome.", *backend, "outcome"
        )
        self.refused_constraints = self._counter(
            "constraints_refused", "Attempts without their schema or grammar, by reason.", *backend, "reason"
        )
        self.backend_first = self._histogram(
            "backend_time_to_first_token",
            "Time from the start of a generation to its first token.",
            *backend,
            bounds=FIRST_S,
        )
        # Observed in batches, so that a token costs no lookup of its own.
        self.gaps = self._histogram(
            "inter_token_latency",
            "Time between tokens of a backend; tokens that arrive together share it equally.",
            *backend,
            bounds=GAPS_S,
        )
        self.prefilled = self._counter("backend_prompt_tokens", "Prompt tokens sent to backends.", *backend)
        self.prefilled_cached = self._counter(
            "backend_prompt_tokens_cached", "Prompt tokens sent to backends that they reported as cached.", *backend
        )
        # Every worker probes the backends itself. The most pessimistic worker decides, so that an alert fires early.
        self.up = self._gauge("backend_up", "1 if a backend is ready, else 0.", *backend, over="livemin")
        self.drained = self._gauge("backend_drained", "1 if a backend is drained, else 0.", *backend, over="livemax")
        self.circuit = self._gauge(
            "backend_circuit_state",
            "State of the circuit breaker: 0 closed, 1 half open, 2 open.",
            *backend,
            "kind",
            over="livemax",
        )
        self.running = self._gauge(
            "backend_requests_running", "Requests of this gateway that run on a backend.", *backend
        )
        self.claimed = self._gauge(
            "backend_tokens_running", "Tokens reserved for the requests that run on a backend.", *backend
        )
        self.foreign = self._gauge(
            "backend_requests_foreign", "Requests of other clients that a backend reports.", *backend, over="livemax"
        )
        self.waiting = self._gauge("queue_length", "Requests that wait for a slot.", "model")

    def _define_quality(self) -> None:
        backend = ("model", "backend")
        self.faulty = self._counter(
            "backend_faulty_answers", "Answers with at least one fault of a kind.", *backend, "fault"
        )
        self.quality = self._gauge(
            "backend_quality_weight", "Fraction of its weight that a backend keeps.", *backend, over="livemin"
        )

        self.hedges = self._counter(
            "hedges", "Requests to a second backend while the first sent nothing: sent, and won.", *backend, "result"
        )
        self.fidelity_samples = self._counter(
            "fidelity_samples", "Answers for the continuous fidelity check, by outcome.", *backend, "outcome"
        )
        self.fidelity_state = self._gauge(
            "backend_fidelity_state", "Fidelity: 0 healthy, 1 warning, 2 quarantined.", *backend, over="livemax"
        )
        self.fidelity_agreement = self._gauge(
            "backend_fidelity_agreement", "Fraction of tokens that equal the reference's.", *backend, over="livemin"
        )
        self.fidelity_divergence = self._gauge(
            "backend_fidelity_divergence_nats", "Mean divergence from the reference.", *backend, over="livemax"
        )

    def _define_tools(self) -> None:
        self.tools = self._counter("tool_calls", "Calls to server tools.", "server", "outcome")
        self.tools_s = self._histogram(
            "tool_call_duration", "Duration of a server tool call.", "server", bounds=WHOLE_S
        )
        self.hooks = self._counter("hook_failures", "Hook calls that failed or timed out.", "hook", "call")

    def _define_owners(self) -> None:
        self.spend = self._counter("spend_dollars", "Cost of answers in dollars.", "model")
        self.refusals = self._counter("refusals", "Requests refused before any attempt, by reason.", "reason")
        self.quota_refusals = self._counter(
            "quota_refusals", "Requests refused by a limit or a budget.", "limit", "owner"
        )
        # Several workers export the same budget; the most recent value is used.
        budget = ("owner", "id")
        self.budget_limit = self._gauge("budget_dollars", "Budget in dollars.", *budget, over="mostrecent")
        self.budget_left = self._gauge(
            "budget_remaining_dollars", "Remaining budget after the last request.", *budget, over="mostrecent"
        )
        self.soft_budget_left = self._gauge(
            "soft_budget_remaining_dollars", "Remaining soft budget; may be negative.", *budget, over="mostrecent"
        )
        self.key_tokens = self._counter("key_tokens", "Tokens, by public id of the key.", "key", "kind")
        self.key_spend = self._counter("key_spend_dollars", "Cost of answers in dollars, by key.", "key", "team")
        self.key_requests = self._counter("key_requests", "HTTP requests, by key.", "key", "team", "outcome")

    def _define_process(self) -> None:
        self.store_s = self._histogram(
            "store_operation_duration", "Duration of a store operation.", "operation", bounds=SHORT_S
        )
        self.store_errors = self._counter("store_errors", "Failed store operations.", "operation", "error")
        self.store_up = self._gauge("store_up", "1 if the store is available, else 0.", over="livemin")
        self.unaccounted = self._gauge("usage_unaccounted_records", "Usage records that are not stored yet.")
        self.lag = self._histogram("event_loop_lag", "Delay of scheduled callbacks in the event loop.", bounds=SHORT_S)
        self.cpu = self._counter("process_cpu_seconds", "CPU time, user and system.")
        self.memory = self._gauge("process_resident_memory_bytes", "Resident memory.")
        self.spans = self._counter("spans", "Spans, by export outcome.", "outcome")
        self.metric_exports = self._counter("metric_exports", "Exports of metrics over OTLP, by outcome.", "outcome")
        self.traces = self._counter("traces", "Recordings of answers, by outcome.", "outcome")
        self.request_files = self._counter(
            "request_file_records", "Records of requests in files, by outcome.", "outcome"
        )
        self.alerts = self._counter("alerts", "Alerts, by outcome.", "outcome")
        self.request_records = self._counter("request_records", "Records of requests, by outcome.", "outcome")

    def _counter(self, name: str, about: str, *labels: str) -> KnownCounter:
        return KnownCounter(f"unisono_{name}", about, labels, registry=self.registry)

    def _gauge(self, name: str, about: str, *labels: str, over: str = "livesum") -> KnownGauge:
        """Create a gauge; `over` is the aggregation mode for several workers."""
        return KnownGauge(f"unisono_{name}", about, labels, registry=self.registry, multiprocess_mode=over)  # type: ignore[arg-type]

    def _histogram(self, name: str, about: str, *labels: str, bounds: Iterable[float]) -> KnownHistogram:
        buckets = tuple(bounds)
        return KnownHistogram(f"unisono_{name}_seconds", about, labels, registry=self.registry, buckets=buckets)

    # Several workers write their values to files in one folder. The collector reads all of them for every scrape.
    def registry_to_scrape(self) -> CollectorRegistry | MultiProcessCollector:
        """Return the registry to scrape: the values of all workers if there are several."""
        folder = os.environ.get(FOLDER)
        if folder and values.ValueClass is not values.MutexValue:
            return MultiProcessCollector(None, folder)  # type: ignore[no-untyped-call]
        return self.registry
