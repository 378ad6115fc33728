"""Quality-weighted routing of a running gateway with two backends, one of which is faulty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.e2e.gateway import Gateway, config_of, gateway
from tests.e2e.test_metrics import BROKEN_OUTPUT, OUTPUT, read
from tests.fakes import FakeVllm

SETTINGS = {"routing_strategy": "quality-aware"}


async def qualities(running: Gateway) -> Sequence[dict[str, Any]]:
    [model] = (await running.get("/v1/status")).body["models"]
    return [deployment["quality"] for deployment in model["deployments"]]


async def answers(running: Gateway, *backends: FakeVllm, count: int) -> list[int]:
    """Send requests, and return how many each backend got."""
    before = [len(each.requests) for each in backends]
    for _ in range(count):
        answer = await running.chat()
        assert answer.status == 200, answer.body
    return [len(each.requests) - old for each, old in zip(backends, before, strict=True)]


async def test_a_faulty_backend_gets_a_quarter_of_its_share() -> None:
    async with (
        FakeVllm(tokens=OUTPUT) as good,
        FakeVllm(tokens=BROKEN_OUTPUT) as bad,
        gateway(config_of(f"vllm@{good.url}", f"vllm@{bad.url}", router_settings=SETTINGS)) as running,
    ):
        await answers(running, good, bad, count=110)
        first, second = await qualities(running)
        assert (first["faulty_per_thousand"], first["weight"]) == (0.0, 1.0)
        assert (second["faulty_per_thousand"], second["weight"]) == (1000.0, 0.25)
        assert second["faults"] == {"recovery": 1000.0}
        assert await answers(running, good, bad, count=50) == [40, 10]
        metrics = await read(running.url)
        labels = {"model": "gpt-oss", "backend": "vllm-2"}
        assert metrics("backend_quality_weight", **labels) == 0.25
        assert metrics("backend_faulty_answers_total", **labels, fault="recovery") >= 50
        assert metrics("backend_faulty_answers_total", model="gpt-oss", backend="vllm-1") == 0
