"""Sections for OpenTelemetry, alerts, the request log, request records and recordings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from unisono.config.addresses import check_http_url
from unisono.config.section_base import Count, Name, Seconds, Section
from unisono.net.ssrf_guard import is_permitted, parse_address, parse_url


def _address(url: SecretStr) -> SecretStr:
    """Reject an invalid address at startup.

    Without this check, an invalid address would be visible only in the metrics, as failed exports.
    """
    check_http_url(url.get_secret_value(), "http://collector:4318/v1/traces")
    return url


class OtelSettings(Section):
    """Export of spans and metrics to an OpenTelemetry collector.

    There is a span for each request, step, tool call and attempt on a backend.
    """

    endpoint: Annotated[SecretStr, AfterValidator(_address)] | None = None
    """Full URL of the collector for traces, such as `http://collector:4318/v1/traces`.
    By default the environment variables `OTEL_EXPORTER_OTLP_*` apply. The URL is treated as secret, because it may
    contain a password."""
    headers: dict[Name, SecretStr] = Field(default_factory=dict)
    """Headers for the collector, such as its API key."""
    metrics: bool = False
    """True also exports the metrics over OTLP. Requires `unisono.metrics`."""
    metrics_endpoint: Annotated[SecretStr, AfterValidator(_address)] | None = None
    """Full URL of the collector for metrics.
    By default `endpoint` with `/v1/metrics` instead of `/v1/traces`."""
    metrics_interval_s: Seconds = 60.0
    """Time between two exports of the metrics, in seconds."""
    service_name: Name = "unisono"
    """Service name in spans and metrics."""
    sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of the requests that are traced, from 0 to 1.
    If a request has a `traceparent` header, the sampling flag in the header decides instead."""
    content: bool = False
    """True adds the messages of requests and answers to their spans.
    It has no effect if `litellm_settings.turn_off_message_logging` is true."""
    content_max_bytes: Annotated[int, Field(ge=1000)] = 65536
    """Maximum size of the input messages in a span, in bytes.
    If the messages are larger, the oldest ones are left out."""
    timeout_s: Seconds = 10.0
    """Time limit for a request to the collector, in seconds."""
    max_queue: Count = 8192
    """Maximum number of spans that wait to be sent.
    Further spans are dropped. The metrics count the dropped spans."""

    @model_validator(mode="after")
    def _has_metrics_endpoint(self) -> OtelSettings:
        if self.metrics and self.metrics_endpoint is None and self.endpoint is not None and not self.metrics_url():
            raise ValueError("`metrics` requires `metrics_endpoint`, because `endpoint` does not end with /v1/traces")
        return self

    def metrics_url(self) -> str | None:
        """Return the URL for metrics; None if the environment variables of OpenTelemetry apply."""
        if self.metrics_endpoint is not None:
            return self.metrics_endpoint.get_secret_value()
        traces = "" if self.endpoint is None else self.endpoint.get_secret_value()
        return traces.removesuffix("traces") + "metrics" if traces.endswith("/v1/traces") else None


# Fields of a line of the request log.
RequestField = (
    Literal["id", "at", "duration_s", "method", "route", "status", "error", "tenant", "key", "key_name", "user"]
    | Literal["model", "served_model", "deployment", "attempts", "input_tokens", "cached_tokens", "output_tokens"]
    | Literal["reasoning_tokens", "first_token_s", "waited_s", "finish", "recoveries", "notes", "cost", "trace_id"]
    | Literal["separate_answer"]
)


class RequestLogSettings(Section):
    """Log of requests, including refused ones: one line per request, without content."""

    enabled: bool = True
    """False logs no requests."""
    sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of the successful requests that are logged, from 0 to 1.
    Failed requests are always logged."""
    fields: tuple[RequestField, ...] | None = None
    """Fields of a line in the JSON format. By default all fields that have a value."""
    probes: bool = False
    """True also logs successful requests to the health checks, the metrics and the web page."""


class RequestRecordSettings(Section):
    """Records of requests in the store, with the fields of the request log.

    They contain no content. The size of a record is at most 16 kB, and usually about 500 bytes.
    """

    keep: Annotated[int, Field(ge=0)] = 100_000
    """Maximum number of records. The oldest records are deleted. 0 stores no records."""
    ttl_s: Seconds = 30 * 86400.0
    """Time after which a record is deleted, in seconds."""


class RequestFileSettings(Section):
    """Records of requests as JSON lines, with the fields of the request log.

    Only the user account of the gateway may read the files. Several processes may share the files.
    """

    path: Name
    """Path of the current file. Its folder must exist.
    Older files have the suffixes `.1`, `.2` and so on."""
    max_bytes: Count = 100 * 1024 * 1024
    """Size at which a file is rotated, in bytes."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 5
    """Maximum number of files, including the current one. The oldest file is deleted."""


def _restore_off(value: object) -> object:
    """Convert false back to `off`, because YAML parses `off` as false."""
    return "off" if value is False else value


TraceMode = Annotated[Literal["off", "recoveries", "all"], BeforeValidator(_restore_off)]


class TraceSettings(Section):
    """Recordings of answers in the store, token by token. They contain the conversations."""

    mode: TraceMode = "off"
    """Which answers to record: `off` for none, `all`, or `recoveries`.
    `recoveries` records an answer if it had a recovery, a failure or a failover, or did not meet a requirement of the
    request."""
    ttl_s: Seconds = 7 * 86400.0
    """Time after which a recording is deleted, in seconds."""
    max_bytes: Count = 1024 * 1024
    """Maximum size of a recording as JSON, in bytes.
    A larger recording is shortened, beginning with the middle of its prompts."""
    keep: Count = 200
    """Maximum number of recordings per tenant. The oldest recordings are deleted."""


def _check_url(url: SecretStr) -> SecretStr:
    parts = parse_url(url.get_secret_value())
    if parts is None:
        raise ValueError("must be a plain http or https URL, such as https://hooks.example.com/alerts")
    address = parse_address(parts[1])
    if address is not None and not is_permitted(address, private=True):
        raise ValueError("must not be the address of a cloud metadata service; set the address of the webhook")
    return url


Fraction = Annotated[float, Field(gt=0, le=1)]


class WebhookSettings(Section):
    """Address that receives each alert as a POST request with JSON."""

    url: Annotated[SecretStr, AfterValidator(_check_url)]
    """URL of the receiver, which is treated as secret. Private addresses are allowed.
    Addresses of cloud metadata services are not allowed."""
    headers: dict[Name, SecretStr] = Field(default_factory=dict)
    """Headers to send with the requests, such as a token."""
    secret: SecretStr | None = None
    """Secret for the signature in `x-unisono-signature`. By default requests are not signed."""
    timeout_s: Seconds = 10.0
    """Time limit for a request, in seconds."""
    retries: Annotated[int, Field(ge=0, le=10)] = 3
    """Maximum number of retries after a network error, or after status 429 or 5xx."""


class AlertSettings(Section):
    """Alerts about budgets and health."""

    webhook: WebhookSettings
    """Receiver of the alerts."""
    budget_thresholds: tuple[Fraction, ...] = (0.8, 1.0)
    """Fractions of a budget. When such a fraction is spent, an alert is sent.
    Each fraction causes at most one alert per budget period. The fraction 1 also causes an alert, once per
    budget period, when a request is refused because the remaining amount is too small for it."""
    health: bool = True
    """True sends an alert when a backend or the store fails, and another when it works again."""
    down_after_s: Seconds = 30.0
    """Time for which a backend or the store must fail before an alert is sent, in seconds."""
    repeat_s: Seconds = 3600.0
    """Time within which the same alert is sent only once, in seconds."""
