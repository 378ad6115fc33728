"""The sections about what is told of the gateway to others: where spans go, and what is recorded of answers."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from unisono.config.section import Count, Name, Seconds, Section


def _address(url: SecretStr) -> SecretStr:
    """Spans are sent behind everybody's back: an address nobody can have is told before."""
    parts = urlsplit(url.get_secret_value())
    if parts.scheme not in ("http", "https") or not parts.hostname or " " in url.get_secret_value():
        raise ValueError("must be a URL such as http://collector:4318/v1/traces")
    return url


class OtelSettings(Section):
    """`unisono.otel`: spans of requests, steps, tools and backends for an OpenTelemetry collector."""

    endpoint: Annotated[SecretStr, AfterValidator(_address)] | None = None
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


def _off(value: object) -> object:
    """YAML reads a bare `off` as no."""
    return "off" if value is False else value


TraceMode = Annotated[Literal["off", "recoveries", "all"], BeforeValidator(_off)]


class TraceSettings(Section):
    """`unisono.traces`: recordings of answers, token by token, in the store. They hold what was said."""

    mode: TraceMode = "off"
    """Which answers: `off` none, `recoveries` those that were mended, failed, moved to another backend, or are not what
    was asked for, `all` every one."""
    ttl_s: Seconds = 7 * 86400.0
    """How long a recording is kept, in seconds."""
    max_bytes: Count = 1024 * 1024
    """How large one may be, as JSON; what is too much is left out of it, the middle of prompts first."""
    keep: Count = 200
    """How many are kept of each tenant; the oldest go."""
