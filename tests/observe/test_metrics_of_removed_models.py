"""Metrics of models and tool servers that are removed from the configuration while they are in use."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from unisono.core.deployments import DeploymentState
from unisono.core.observer import GenerationDone, GenerationOutcome, GenerationStarted, ToolDone, ToolEnd
from unisono.observe.metrics import Metrics

STARTED = GenerationStarted("req_1", "local", "", "chat", "removed", background=False, at=0.0)
CALL = ToolDone("files", "read", "call_1", 0.0, 0.1, ToolEnd.OK)
DEPLOYMENT: Any = SimpleNamespace(
    model="removed",
    name="vllm",
    state=DeploymentState.READY,
    running=1,
    waiting=4,
    tokens=0,
    foreign=0,
    circuits={},
    quality=SimpleNamespace(weight=1.0),
    fidelity=None,
    hedges=0,
    hedges_won=0,
)


def configured(metrics: Metrics, *models: str, servers: tuple[str, ...] = ()) -> None:
    metrics.know(models, [(model, "vllm") for model in models], servers, {})


async def series(metrics: Metrics, name: str) -> dict[str, float]:
    """Return the values of a metric by model or tool server."""
    families = text_string_to_metric_families((await metrics.text()).decode())
    samples = [sample for family in families for sample in family.samples if sample.name == f"unisono_{name}"]
    return {sample.labels.get("model") or sample.labels["server"]: sample.value for sample in samples}


@pytest.mark.parametrize("is_added_again", [False, True])
async def test_answers_end_with_the_labels_with_which_they_started(is_added_again: bool) -> None:
    metrics = Metrics("test")
    configured(metrics, "removed", "other", servers=("files",))
    metrics.generation_started(STARTED)
    configured(metrics, "other")
    if is_added_again:
        configured(metrics, "removed", "other")
    metrics.ended(GenerationDone(STARTED, 1.0, GenerationOutcome.COMPLETED, tools=[CALL], cost=5))
    assert await series(metrics, "requests_in_flight") == {"removed": 0}
    assert await series(metrics, "requests_total") == {"removed": 1}
    assert await series(metrics, "spend_dollars_total") == {"removed": 5e-6}
    assert await series(metrics, "tool_calls_total") == {"files": 1}


async def test_the_queue_of_a_removed_model_is_not_exported() -> None:
    metrics = Metrics("test")
    configured(metrics, "removed")
    metrics.sample([DEPLOYMENT], store_works=True)
    assert await series(metrics, "queue_length") == {"removed": 4}
    configured(metrics)
    assert await series(metrics, "queue_length") == {}


async def test_a_model_that_was_never_configured_is_counted_as_other() -> None:
    metrics = Metrics("test")
    configured(metrics, "gpt-oss")
    started = replace(STARTED, model="unknown")
    metrics.generation_started(started)
    metrics.ended(GenerationDone(started, 1.0, GenerationOutcome.COMPLETED))
    assert await series(metrics, "requests_in_flight") == {"other": 0}
