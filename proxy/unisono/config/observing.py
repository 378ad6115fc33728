"""The sections about what is told of the gateway to others: where spans go."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, SecretStr

from unisono.config.parts import Count, Name, Seconds, Section


class OtelSettings(Section):
    """`unisono.otel`: spans of requests, steps, tools and backends for an OpenTelemetry collector."""

    endpoint: SecretStr | None = None
    """The collector's whole URL for traces (`http://collector:4318/v1/traces`); by default what `OTEL_EXPORTER_OTLP_*`
    variables say. A secret, for it may hold a password."""
    headers: dict[Name, SecretStr] = Field(default_factory=dict)
    """Sent along to the collector, such as its key."""
    service_name: Name = "unisono"
    """Which service the spans are of."""
    sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The part of requests that is traced; for those that come with a `traceparent` that one says."""
    timeout_s: Seconds = 10.0
    """How long the collector may take, in seconds."""
    max_queue: Count = 8192
    """Spans that may wait to be sent; what comes beyond is dropped and counted."""
