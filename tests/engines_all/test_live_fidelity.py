"""Continuous fidelity, shadows, canaries and hedges in a gateway with two real engines."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway, gateway
from tests.engines_all.engines import running
from tests.engines_all.setup.places import MXFP4
from tests.engines_all.test_fidelity import QUESTIONS, changed_copy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="session"),
]

THRESHOLDS = {"agreement": 0.98, "divergence": 0.0005}
WATCHED = {
    "reference": "llamacpp-1",
    "sample": 1.0,
    "budget": 10_000_000,
    "thresholds": THRESHOLDS,
    "quarantine_s": 600,
}


def coarse(folder: Path) -> Path:
    """Return a copy of the model with matrices rounded to 3 bits.

    Sampled answers of equal weights differ by 0.0003 nats between mlx and llama.cpp, and those of a copy in 4 bits by
    0.002 to 0.003, which takes many more answers to find. The matrices keep their format, as mlx computes with
    quantised ones ten times slower on a CPU.
    """
    import mlx.core as mx

    def rounded(_: str, weight: Any) -> Any:
        if weight.shape[1] % 32:
            return weight
        return mx.dequantize(*mx.quantize(weight, group_size=32, bits=3), group_size=32, bits=3)

    return changed_copy(folder, rounded)


def entry(model: str, url: str | None = None, **unisono: Any) -> dict[str, Any]:
    params = {"model": model, **({"api_base": url} if url else {})}
    return {
        "model_name": "gpt-oss",
        "litellm_params": params,
        "model_info": {"max_input_tokens": 4096},
        "unisono": unisono,
    }


async def statuses(site: Gateway) -> dict[str, Mapping[str, Any]]:
    [model] = (await site.get("/v1/status")).body["models"]
    return {each["name"]: each for each in model["deployments"]}


async def ask(site: Gateway, number: int) -> str:
    """Ask one of the questions, and return the deployment that answered."""
    question = QUESTIONS[number % len(QUESTIONS)]
    answer = await site.chat(messages=[{"role": "user", "content": f"{question} ({number})"}], max_tokens=40)
    assert answer.status == 200, answer.body
    return answer.headers["x-unisono-backend"]


async def post(site: Gateway, path: str, body: Mapping[str, Any], deployment: str) -> Answer:
    answer = await site.post(path, json.dumps(body).encode(), x_unisono_deployment=deployment)
    assert answer.status == 200, answer.body
    assert answer.headers.get("x-unisono-backend", deployment) == deployment
    return answer


async def scored_until(
    site: Gateway, deployment: str, is_reached: Callable[[Mapping[str, Any]], bool]
) -> Mapping[str, Any]:
    """Ask a deployment until the status of the one that is measured is as wanted; return its fidelity."""
    for number in range(200):
        before = (await statuses(site))["mlx-1"]["fidelity"]["answers"]
        question = f"{QUESTIONS[number % len(QUESTIONS)]} ({number})"
        body = {"model": "gpt-oss", "messages": [{"role": "user", "content": question}], "max_tokens": 40}
        await post(site, "/v1/chat/completions", body, deployment)
        # Answers are scored in idle time: another request would cancel it.
        for _ in range(100):
            found = (await statuses(site))["mlx-1"]
            if found["fidelity"]["answers"] != before:
                break
            await asyncio.sleep(0.2)
        if is_reached(found):
            fidelity: Mapping[str, Any] = found["fidelity"]
            return fidelity
    raise AssertionError(found)


async def test_equal_weights_stay_healthy() -> None:
    with running("llamacpp") as engine:
        config = {
            "model_list": [entry("llamacpp/tiny", engine.url), entry(f"mlx/{MXFP4}")],
            "unisono": {"fidelity": {"gpt-oss": WATCHED}},
        }
        async with gateway(config) as site:
            found = await scored_until(site, "mlx-1", lambda each: each["fidelity"]["answers"] >= 30)
    print("equal weights:", found)
    assert found["state"] == "healthy"
    assert found["agreement"] > 0.99


async def test_a_quantised_copy_is_quarantined(tmp_path: Path) -> None:
    with running("llamacpp") as engine:
        config = {
            "model_list": [entry("llamacpp/tiny", engine.url), entry(f"mlx/{coarse(tmp_path)}")],
            "unisono": {"fidelity": {"gpt-oss": WATCHED}},
        }
        async with gateway(config) as site:
            found = await scored_until(site, "mlx-1", lambda each: each["state"] == "quarantined")
            print("quantised:", found)
            assert found["exceeded"] == ["divergence"]
            assert {await ask(site, number) for number in range(4)} == {"llamacpp-1"}


async def test_a_shadow_is_compared_and_never_answers(tmp_path: Path) -> None:
    with running("llamacpp") as engine:
        copy = coarse(tmp_path)
        config = {
            "model_list": [entry("llamacpp/tiny", engine.url), entry(f"mlx/{copy}", shadow="llamacpp-1")],
            "unisono": {"fidelity": {"gpt-oss": WATCHED}},
        }
        async with gateway(config) as site:
            found = await scored_until(site, "llamacpp-1", lambda each: each["fidelity"]["state"] == "warning")
            print("shadow:", found)
            assert {await ask(site, number) for number in range(10)} == {"llamacpp-1"}


async def test_a_canary_gets_its_share() -> None:
    with running("llamacpp") as engine:
        config = {"model_list": [entry("llamacpp/tiny", engine.url), entry(f"mlx/{MXFP4}", canary=20)]}
        async with gateway(config) as site:
            answered = Counter([await ask(site, number) for number in range(120)])
    # 24 are expected; fewer than 8 or more than 44 happen once in 100,000 runs.
    assert 8 <= answered["mlx-1"] <= 44, answered


async def test_an_unchanged_fork_reproduces_the_answer_on_both_engines() -> None:
    with running("llamacpp") as engine:
        config = {
            "model_list": [entry("llamacpp/tiny", engine.url), entry(f"mlx/{MXFP4}")],
            "unisono": {"traces": {"mode": "all"}},
        }
        async with gateway(config) as site:
            for name in ("llamacpp-1", "mlx-1"):
                question = [{"role": "user", "content": QUESTIONS[0]}]
                body = {"model": "gpt-oss", "messages": question, "temperature": 0, "max_tokens": 200}
                answer = await post(site, "/v1/chat/completions", body, name)
                id = answer.headers["x-request-id"]
                for _ in range(100):
                    if (await site.get(f"/v1/traces/{id}")).status == 200:
                        break
                    await asyncio.sleep(0.1)
                for at in (0, 4):
                    fork = await post(site, f"/v1/traces/{id}/fork", {"at": at}, name)
                    assert fork.body["first_difference"] is None, name
                    assert len(fork.body["forked"]) == len(fork.body["recorded"]) > 4
