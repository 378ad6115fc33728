"""Trace spans of requests that were rejected before a generation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from unisono.core.request_record import GENERATIONS, RequestRecord
from unisono.core.trace_context import ARRIVED, TraceContext
from unisono.observe.spans import Span, SpanType, Value, caller_attributes, create_span

CLIENT_LEFT: Final = 499


class RefusalSpans:
    """Receiver of request records that exports a span for each rejected request.

    A request that has started a generation already has the span of the generation. `export` receives the spans.
    `new_trace` returns the context of a new span, and decides whether it is sampled. Requests to the routes `probes`
    get no span.
    """

    def __init__(
        self,
        export: Callable[[Sequence[Span]], None],
        new_trace: Callable[[], TraceContext],
        probes: Collection[str],
    ) -> None:
        self._export = export
        self._new_trace = new_trace
        self._probes = frozenset(probes)

    def __call__(self, record: RequestRecord) -> None:
        # A generation has its own span, even if it was rejected.
        if record.status < 400 or record.status == CLIENT_LEFT or record.route in self._probes or GENERATIONS.get():
            return
        at, arrived = self._new_trace(), ARRIVED.get()
        if at.sampled:
            self._export([refusal_span(record, at, arrived.span_id if arrived is not None else "")])


def refusal_span(record: RequestRecord, at: TraceContext, parent: str) -> Span:
    """Return the span of a request that was rejected before a generation.

    `at` is the context of the new span. `parent` is the id of its parent span, or "" without one.
    """
    found: dict[str, Value] = {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "gen_ai.request.model": record.model,
        "user.id": record.user,
        "unisono.request.id": record.id,
    }
    attributes = caller_attributes(record.key, record.key_name, record.tenant)
    attributes |= {name: value for name, value in found.items() if value}
    name, times = f"{record.method} {record.route}".strip(), (0.0, record.duration_s)
    error = record.error or str(record.status)
    return create_span(name, SpanType.SERVER, at, parent, record.at, times, attributes, error)
