"""OpenTelemetry collector for tests: receives spans and metrics over OTLP/HTTP and decodes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Wire


@dataclass(frozen=True)
class ReceivedSpan:
    """A received span; ids are hexadecimal."""

    name: str
    kind: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    error: str
    attributes: Mapping[str, Any]
    resource: Mapping[str, Any]


@dataclass
class Collector:
    url: str
    status: int = 200
    # Accept requests and never answer.
    stalls: bool = False
    spans: list[ReceivedSpan] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    # Bodies and headers of the requests with metrics.
    metrics: list[ExportMetricsServiceRequest] = field(default_factory=list)
    metric_headers: list[Mapping[str, str]] = field(default_factory=list)

    async def settled(self, count: int) -> list[ReceivedSpan]:
        """Wait for `count` spans and return all spans."""
        async with asyncio.timeout(20):
            while len(self.spans) < count:
                await asyncio.sleep(0.02)
        return self.spans

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        if self.stalls:
            await asyncio.Event().wait()
        self.raw.append(body)
        self.headers.append(dict(request.headers))
        if self.status == 200:
            self.spans += decoded(body)
        return web.Response(status=self.status, content_type="application/x-protobuf")

    async def take_metrics(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.metric_headers.append(dict(request.headers))
        if self.status == 200:
            self.metrics.append(ExportMetricsServiceRequest.FromString(body))
        return web.Response(status=self.status, content_type="application/x-protobuf")


def attributes_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def decoded(body: bytes) -> list[ReceivedSpan]:
    request = ExportTraceServiceRequest.FromString(body)
    spans = []
    for group in request.resource_spans:
        resource = {pair.key: _value(pair.value) for pair in group.resource.attributes}
        for scope in group.scope_spans:
            for span in scope.spans:
                attributes = {pair.key: _value(pair.value) for pair in span.attributes}
                ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                times = (span.start_time_unix_nano, span.end_time_unix_nano)
                kind = Wire.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_")
                spans.append(ReceivedSpan(span.name, kind, *ids, *times, span.status.message, attributes, resource))
    return spans


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    found = Collector("")
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/traces", found.take)
    app.router.add_post("/v1/metrics", found.take_metrics)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    found.url = f"http://{host}:{port}/v1/traces"
    try:
        yield found
    finally:
        await runner.cleanup()


def traced(found: Collector, **settings: Any) -> dict[str, Any]:
    """Return a configuration section that sends spans to the collector."""
    return {"unisono": {"otel": {"endpoint": found.url, "timeout_s": 2, **settings}}}
