"""Export of spans to an OpenTelemetry collector, in a separate thread.

Queueing spans never blocks. The thread is woken once per batch, because each wake-up delays generation. If the queue is
full, further spans are dropped and counted. If the collector is unreachable, spans are lost, but requests are not
affected.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from unisono.core.observer import GenerationDone, GenerationStarted, Observer
from unisono.observe.span_content import content_of
from unisono.observe.spans import Span, SpanType, spans_of

KINDS: Final = {
    SpanType.SERVER: SpanKind.SERVER,
    SpanType.INTERNAL: SpanKind.INTERNAL,
    SpanType.CLIENT: SpanKind.CLIENT,
}
# Maximum number of spans in one request to the collector.
AT_ONCE: Final = 512
# If more spans than this are queued, new spans are queued without their content, which needs much memory.
MAX_QUEUED_WITH_CONTENT: Final = 1024
# Time in seconds for which spans are collected for one request to the collector.
WAIT_S: Final = 1.0
# Maximum time in seconds for which the shutdown waits until the queue is empty.
CLOSING_S: Final = 3.0

# Callback with the outcome of spans (`exported`, `dropped` or `failed`) and their number.
Count = Callable[[str, int], None]

log = logging.getLogger("unisono.spans")


class Exporter(Observer):
    """Observer that exports the spans of generations.

    `endpoint` is the collector's full URL for traces. If it is None, the OpenTelemetry library reads its own
    environment variables. `most` is the maximum number of queued spans. `kinds` maps deployments to backend kinds.
    `content_bytes` is the maximum size of the messages in a span.
    """

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
        content_bytes: int = 0,
    ) -> None:
        self._exporter = OTLPSpanExporter(endpoint=endpoint, headers=dict(headers) or None, timeout=timeout_s)
        self._resource = Resource.create({"service.name": service, "service.version": version})
        self._scope = InstrumentationScope("unisono", version)
        self._count = count
        self._content_bytes = content_bytes
        self._waiting: deque[Span] = deque()
        self._max_queued = most
        self._max_batch = min(AT_ONCE, most)
        self._has_spans = threading.Event()
        self._has_batch = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._export_batches, name="spans", daemon=True)
        self.kinds: Mapping[str, str] = {}

    async def start(self) -> None:
        self._thread.start()

    async def aclose(self) -> None:
        """Send the queued spans, but give up after a short timeout."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._closing.set()
        self._has_batch.set()
        self._has_spans.set()
        if self._thread.is_alive():
            self._thread.join(CLOSING_S)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def generation_started(self, began: GenerationStarted) -> None:
        """Do nothing: spans are created when a generation has ended."""

    def ended(self, done: GenerationDone) -> None:
        spans = spans_of(done, self.kinds)
        if spans and spans[0].content is not None and len(self._waiting) > MAX_QUEUED_WITH_CONTENT:
            spans[0] = replace(spans[0], content=None)
        self.add(spans)

    def add(self, spans: Sequence[Span]) -> None:
        """Queue spans; those beyond the limit of the queue are dropped and counted."""
        accepted = spans[: max(self._max_queued - len(self._waiting), 0)]
        self._waiting += accepted
        self._wake()
        if len(accepted) < len(spans):
            self._count("dropped", len(spans) - len(accepted))

    def _wake(self) -> None:
        """Wake the thread if there is work."""
        if self._waiting and not self._has_spans.is_set():
            self._has_spans.set()
        if len(self._waiting) >= self._max_batch and not self._has_batch.is_set():
            self._has_batch.set()

    def _export_batches(self) -> None:
        while self._waiting or not self._closing.is_set():
            self._has_spans.wait()
            if not self._closing.is_set():
                # Wait for further spans, to send them in the same request.
                self._has_batch.wait(WAIT_S)
            self._has_spans.clear()
            self._has_batch.clear()
            spans = [self._waiting.popleft() for _ in range(min(self._max_batch, len(self._waiting)))]
            self._wake()
            if spans:
                self._send(spans)

    def _send(self, spans: list[Span]) -> None:
        try:
            is_exported = self._exporter.export([self._readable(span) for span in spans]) is SpanExportResult.SUCCESS
        except Exception as error:
            log.exception("spans could not be exported", exc_info=error)
            is_exported = False
        self._count("exported" if is_exported else "failed", len(spans))

    def _readable(self, span: Span) -> ReadableSpan:
        attributes = dict(span.attributes) | ({"error.type": span.error} if span.error else {})
        if span.content is not None:
            attributes |= content_of(span.content, self._content_bytes)
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
