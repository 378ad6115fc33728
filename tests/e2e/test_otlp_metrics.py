"""Metrics sent to a real collector over OTLP/HTTP: names, values and failures of the collector."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE, Metric

from tests.e2e.collector import Collector, attributes_of, collector, traced
from tests.e2e.gateway import config_of, gateway
from tests.e2e.test_metrics import read
from tests.fakes import FakeVllm
from unisono.errors import ConfigError
from unisono.harmony.encoding import load_encoding

ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>Hello.<|return|>")


def exporting(found: Collector, **settings: Any) -> dict[str, Any]:
    return traced(found, metrics=True, metrics_interval_s=0.2, sample=0, **settings)


def points_of(metric: Metric) -> list[tuple[dict[str, Any], Any]]:
    kind = metric.WhichOneof("data")
    data = getattr(metric, kind or "gauge")
    return [(attributes_of(point.attributes), point) for point in data.data_points]


def received(found: Collector) -> defaultdict[str, Metric]:
    """Return the newest metrics by name."""
    newest = found.metrics[-1].resource_metrics[0].scope_metrics[0].metrics if found.metrics else ()
    return defaultdict(Metric, {metric.name: metric for metric in newest})


async def test_the_collector_receives_all_metrics_with_the_names_of_the_conventions() -> None:
    async with FakeVllm(tokens=ANSWER) as fake, collector() as found:
        config = config_of(f"vllm@{fake.url}", **exporting(found, headers={"x-api-key": "k"}, service_name="gateway-1"))
        async with gateway(config) as running:
            for _ in range(3):
                assert (await running.chat()).status == 200
            async with asyncio.timeout(20):
                # The state of backends is sampled once a second.
                while not any(value.as_double for _, value in points_of(received(found)["unisono_backend_up"])):
                    await asyncio.sleep(0.05)
    # The last values are sent at the end.
    (resource,) = found.metrics[-1].resource_metrics
    named = attributes_of(resource.resource.attributes)
    assert (named["service.name"], bool(named["service.instance.id"])) == ("gateway-1", True)
    assert found.metric_headers[-1]["x-api-key"] == "k"
    assert not found.spans
    metrics = received(found)

    requests = metrics["unisono_requests"]
    assert requests.sum.is_monotonic
    assert requests.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    [(attributes, point)] = points_of(requests)
    assert (attributes["model"], attributes["outcome"], point.as_double) == ("gpt-oss", "completed", 3)
    assert 0 < point.start_time_unix_nano < point.time_unix_nano

    tokens = metrics["gen_ai.client.token.usage"]
    assert tokens.unit == "{token}"
    of_kind = {each["gen_ai.token.type"]: point for each, point in points_of(tokens)}
    output = of_kind["output"]
    assert (output.count, output.sum) == (3, 3 * len(ANSWER))
    assert sum(output.bucket_counts) == 3
    assert len(output.bucket_counts) == len(output.explicit_bounds) + 1
    # 4 < the tokens of an answer <= 16.
    assert output.bucket_counts[[*output.explicit_bounds].index(16.0)] == 3
    assert not output.HasField("min")

    [(up, value)] = points_of(metrics["unisono_backend_up"])
    assert (up, value.as_double) == ({"model": "gpt-oss", "backend": "vllm-1"}, 1)
    assert metrics["gen_ai.server.request.duration"].unit == "s"


async def test_the_standard_variables_apply_without_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, collector() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url.removesuffix("/v1/traces"))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "x-api-key=of-metrics")
        otel = {"metrics": True, "sample": 0}
        async with gateway(config_of(f"vllm@{fake.url}", unisono={"otel": otel})) as running:
            assert (await running.chat()).status == 200
    assert len(found.metrics) == 1
    assert found.metric_headers[0]["x-api-key"] == "of-metrics"


async def test_a_failing_collector_is_counted_and_harms_nothing() -> None:
    async with FakeVllm(tokens=ANSWER) as fake, collector() as found:
        found.status = 400
        async with gateway(config_of(f"vllm@{fake.url}", **exporting(found))) as running:
            assert (await running.chat()).status == 200
            async with asyncio.timeout(20):
                while not (await read(running.url))("metric_exports_total", outcome="failed"):
                    await asyncio.sleep(0.05)


INVALID = {
    "no metrics": ({"metrics": False}, {"metrics": True}, "unisono.otel.metrics: metrics are off"),
    "other path": ({}, {"metrics": True, "endpoint": "http://collector:4318/in"}, "requires `metrics_endpoint`"),
}


@pytest.mark.parametrize(("settings", "otel", "message"), INVALID.values(), ids=INVALID)
async def test_metrics_without_a_source_or_destination(
    settings: dict[str, Any], otel: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        async with gateway(config_of("vllm@http://127.0.0.1:9", unisono={**settings, "otel": otel})):
            pass
