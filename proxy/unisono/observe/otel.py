"""Sends spans to an OpenTelemetry collector, from a thread of its own.

Handing spans over never waits: so many may lie in the queue, and what comes beyond is dropped and counted. A collector
that cannot be reached costs spans and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from unisono.core.watching import Began, Done, Observer
from unisono.observe.spans import Kind, Span, spans_of

KINDS: Final = {Kind.SERVER: SpanKind.SERVER, Kind.INTERNAL: SpanKind.INTERNAL, Kind.CLIENT: SpanKind.CLIENT}
AT_ONCE: Final = 512
"""Spans of one request to the collector."""
WAIT_S: Final = 1.0
"""How long a request waits for more spans to go with it."""
CLOSING_S: Final = 3.0
"""How long the end waits for what is in the queue."""

Count = Callable[[str, int], None]
"""Told what became of spans, `exported`, `dropped` or `failed`, and of how many."""

log = logging.getLogger("unisono.spans")


class Exporter(Observer):
    """Told of turns, it exports their spans. `endpoint` is the collector's whole URL for traces; without one the
    library's own variables say where it is. `kinds` are those of backends, by deployment."""

    def __init__(
        self,
        *,
        endpoint: str | None,
        headers: Mapping[str, str],
        service: str,
        version: str,
        timeout_s: float,
        most: int,
        count: Count,
    ) -> None:
        self._exporter = OTLPSpanExporter(endpoint=endpoint, headers=dict(headers) or None, timeout=timeout_s)
        self._resource = Resource.create({"service.name": service, "service.version": version})
        self._scope = InstrumentationScope("unisono", version)
        self._count = count
        self._waiting: queue.Queue[Span | None] = queue.Queue(most)
        self._at_once = min(AT_ONCE, most)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="spans", daemon=True)
        self.kinds: Mapping[str, str] = {}

    async def start(self) -> None:
        self._thread.start()

    async def aclose(self) -> None:
        """Send what there is, for a moment."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._closing.set()
        with suppress(queue.Full):
            self._waiting.put_nowait(None)
        if self._thread.is_alive():
            self._thread.join(CLOSING_S)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def began(self, began: Began) -> None:
        """Spans are made of turns that ended."""

    def ended(self, done: Done) -> None:
        dropped = 0
        for span in spans_of(done, self.kinds):
            try:
                self._waiting.put_nowait(span)
            except queue.Full:
                dropped += 1
        if dropped:
            self._count("dropped", dropped)

    def _work(self) -> None:
        while not (self._closing.is_set() and self._waiting.empty()):
            if spans := self._next():
                self._send(spans)

    def _next(self) -> list[Span]:
        """What goes with the first span that comes."""
        spans: list[Span] = []
        first = self._waiting.get()
        until = monotonic() + WAIT_S
        while first is not None:
            spans.append(first)
            left_s = 0.0 if self._closing.is_set() else until - monotonic()
            if len(spans) == self._at_once:
                break
            try:
                first = self._waiting.get(timeout=left_s) if left_s > 0 else self._waiting.get_nowait()
            except queue.Empty:
                break
        return spans

    def _send(self, spans: list[Span]) -> None:
        try:
            taken = self._exporter.export([self._readable(span) for span in spans]) is SpanExportResult.SUCCESS
        except Exception as error:
            log.exception("spans could not be exported", exc_info=error)
            taken = False
        self._count("exported" if taken else "failed", len(spans))

    def _readable(self, span: Span) -> ReadableSpan:
        attributes = dict(span.attributes) | ({"error.type": span.error} if span.error else {})
        return ReadableSpan(
            name=span.name,
            context=_context(span, span.at.span_id),
            parent=_context(span, span.parent) if span.parent else None,
            resource=self._resource,
            attributes=attributes,
            kind=KINDS[span.kind],
            instrumentation_scope=self._scope,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start_ns,
            end_time=span.end_ns,
        )


def _context(span: Span, span_id: str) -> SpanContext:
    state = TraceState.from_header([span.at.state]) if span.at.state else None
    ids = int(span.at.trace_id, 16), int(span_id, 16)
    return SpanContext(*ids, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED), trace_state=state)
