"""Span of a tool call: the SDK writes the current span into the request it sends (SEP-414)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, use_span

from unisono.core.trace_context import TraceContext


@contextmanager
def child_of(trace: TraceContext | None) -> Iterator[None]:
    """Make `trace` the parent of requests sent in this context and in tasks started in it."""
    if trace is None:
        yield
        return
    flags = TraceFlags(TraceFlags.SAMPLED if trace.sampled else TraceFlags.DEFAULT)
    state = TraceState.from_header([trace.state]) if trace.state else None
    ids = int(trace.trace_id, 16), int(trace.span_id, 16)
    context = SpanContext(*ids, is_remote=False, trace_flags=flags, trace_state=state)
    with use_span(NonRecordingSpan(context)):
        yield
