"""Metrics of spend, budgets, refusals, keys and teams, and those with the names of OpenTelemetry."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.gateway import config_of
from tests.e2e.keyed import MASTER, bearing, keyed
from tests.e2e.test_limits import config_with_price
from tests.e2e.test_metrics import Metrics, read
from tests.fakes import FakeVllm
from unisono.core.quotas import KeyLimits
from unisono.core.request_record import RequestRecord
from unisono.harmony.encoding import load_encoding
from unisono.observe.metrics import Metrics as ProcessMetrics

ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>Hello.<|return|>")


def gen_ai(metrics: Metrics, name: str, **labels: str) -> float:
    """Return the sum of the samples of a metric of the conventions."""
    return sum(
        sample.value
        for sample in metrics.samples
        if sample.name == f"gen_ai_{name}" and labels.items() <= sample.labels.items()
    )


async def test_spend_and_refusals_are_counted_by_key_and_team(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER) as fake:
        config = config_with_price(fake.url, input=0.0, output=100.0)
        config["unisono"] = {"metrics_per_key": True, "metrics_max_keys": 2}
        async with keyed(config, tmp_path) as (running, keys):
            # A dollar is a million micro-dollars. Each answer costs 100 micro-dollars per token.
            first, first_key = await keys.issue("red", KeyLimits(money_budget=1_000_000))
            small, small_key = await keys.issue("red", KeyLimits(money_budget=0))
            _, third_key = await keys.issue("blue", KeyLimits(money_budget=1_000_000))
            for key, status in [(first_key, 200), (first_key, 200), (small_key, 429), (third_key, 200)]:
                assert (await running.chat_as(key)).status == status
            assert (await running.chat_as("sk-unknown")).status == 401
            metrics = await read(running.url, **bearing(MASTER))
    cost = len(ANSWER) * 100 / 1e6
    close = 1e-9
    assert abs(metrics("spend_dollars_total", model="gpt-oss") - 3 * cost) < close
    assert abs(metrics("key_spend_dollars_total", key=first.id, team="red") - 2 * cost) < close
    assert abs(metrics("key_spend_dollars_total", key="other", team="blue") - cost) < close
    assert metrics("key_tokens_total", key=first.id, kind="generation") == 2 * len(ANSWER)
    assert metrics("key_requests_total", key=first.id, team="red", outcome="ok") == 2
    assert metrics("key_requests_total", key=small.id, team="red", outcome="refused") == 1
    assert metrics("refusals_total", reason="invalid_api_key") == 1
    assert metrics("refusals_total", reason="insufficient_quota") == 1
    assert metrics("quota_refusals_total", limit="money_budget", owner="key") == 1
    assert metrics("budget_dollars", owner="key", id=first.id) == 1
    assert abs(metrics("budget_remaining_dollars", owner="key", id=first.id) - (1 - 2 * cost)) < close
    # The amounts of several keys beyond the maximum would overwrite each other.
    assert not [sample for sample in metrics.samples if sample.labels.get("id") == "other"]


async def test_without_the_option_no_metric_names_a_key(tmp_path: Path) -> None:
    async with (
        FakeVllm(tokens=ANSWER) as fake,
        keyed(config_with_price(fake.url, input=1.0, output=10.0), tmp_path) as (running, keys),
    ):
        record, key = await keys.issue("red", KeyLimits(money_budget=1_000_000))
        assert (await running.chat_as(key)).status == 200
        text = (await read(running.url, **bearing(key))).text
    assert record.id not in text
    assert '"red"' not in text
    assert "unisono_spend_dollars_total{" in text


async def test_answers_and_attempts_have_metrics_of_the_conventions(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, _):
        assert (await running.chat_as(MASTER)).status == 200
        metrics = await read(running.url, **bearing(MASTER))
    answer = {"gen_ai_operation_name": "chat", "gen_ai_request_model": "gpt-oss", "gen_ai_response_model": "gpt-oss"}
    own, backend = {**answer, "gen_ai_provider_name": "unisono"}, {**answer, "gen_ai_provider_name": "vllm"}
    assert gen_ai(metrics, "server_request_duration_seconds_count", **own, error_type="") == 1
    assert gen_ai(metrics, "server_time_to_first_token_seconds_count", **own) == 1
    assert gen_ai(metrics, "server_time_per_output_token_seconds_count", **own) == 1
    assert gen_ai(metrics, "client_operation_duration_seconds_count", **backend, error_type="") == 1
    assert gen_ai(metrics, "client_operation_time_to_first_chunk_seconds_count", **backend) == 1
    assert gen_ai(metrics, "client_token_usage_sum", **backend, gen_ai_token_type="output") == len(ANSWER)
    assert gen_ai(metrics, "client_token_usage_count", **backend, gen_ai_token_type="input") == 1


async def test_ten_thousand_keys_have_a_bounded_number_of_series() -> None:
    metrics = ProcessMetrics("test")
    metrics.owners.is_per_key = True
    metrics.owners.limit_labels(100)
    one = RequestRecord("req_1", 0.0, 0.1, "POST", "/v1/chat/completions", 200, model="gpt-oss")
    for number in range(10_000):
        record = one._replace(key=f"key_{number}", tenant=f"team_{number % 5000}", error=f"code_{number}", status=403)
        metrics.answered(record)
    found = Metrics((await metrics.text()).decode())
    for name, label, most in (("key_requests_total", "key", 100), ("refusals_total", "reason", 100)):
        values = {sample.labels[label] for sample in found.samples if sample.name == f"unisono_{name}"}
        assert len(values) == most + 1
        assert "other" in values
        assert found(name) == 10_000
    series = [sample for sample in found.samples if sample.name == "unisono_key_requests_total"]
    assert len(series) <= 201


async def test_only_errors_are_refusals() -> None:
    metrics = ProcessMetrics("test")
    metrics.answered(RequestRecord("req_1", 0.0, 0.1, "GET", "/health/readiness", 503))
    metrics.answered(RequestRecord("req_2", 0.0, 0.1, "POST", "/v1/responses", 503, error="backend_unavailable"))
    found = Metrics((await metrics.text()).decode())
    samples = [sample for sample in found.samples if sample.name == "unisono_refusals_total"]
    assert [(sample.labels["reason"], sample.value) for sample in samples] == [("backend_unavailable", 1)]
