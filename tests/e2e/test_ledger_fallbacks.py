"""A fallback is charged at its own price; ledger, usage and headers name both models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract.servers import Server
from tests.e2e.gateway import config_of, gateway
from tests.e2e.keyed import bearing, ring, with_keys
from tests.fakes import FakeVllm, Refusal
from unisono.core.quotas import KeyLimits
from unisono.harmony.encoding import load_encoding

pytestmark = pytest.mark.timeout(60)

ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>Hello.<|return|>")
CHAT = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"model": "gpt-oss", "input": "Hi", "store": False, "max_output_tokens": 100},
    "/v1/completions": {"model": "gpt-oss", "prompt": "Hi", "max_tokens": 100},
}
REQUESTS = [(path, {**body, "stream": stream}) for path, body in PATHS.items() for stream in (False, True)]
CHEAP, EXPENSIVE = {"input": 1.0, "output": 1.0}, {"input": 5.0, "output": 500.0}


def broken(body: Any) -> Refusal:
    return Refusal(500, b'{"error":"broken"}')


def config_with(name: str, address: str, *models: tuple[str, str, dict[str, float]]) -> dict[str, Any]:
    """Configure models by name, backend and price; the first one falls back to the last."""
    entries = [
        {
            "model_name": model,
            "litellm_params": {"model": "vllm/tiny", "api_base": url},
            "model_info": {"harmony": True},
            "unisono": {"price": price},
        }
        for model, url, price in models
    ]
    fallbacks = [{name: [models[-1][0]]}] if models[-1][0] != name else []
    config = config_of(unisono={"raw_completions": True}, router_settings={"fallbacks": fallbacks, "num_retries": 2})
    return with_keys({**config, "model_list": entries}, address)


@pytest.fixture(params=["redis", "sqlite"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/state.db"
    server: Server = request.getfixturevalue("redis_server")
    with server.client() as client:
        client.flushall()
    return server.url


@pytest.mark.parametrize("served", ["dear", "gpt-oss"], ids=["fallback", "mixed group"])
async def test_an_answer_costs_the_price_of_its_deployment(address: str, served: str) -> None:
    async with FakeVllm(script=broken) as first, FakeVllm(tokens=ANSWER) as second, ring(address) as keys:
        config = config_with("gpt-oss", address, ("gpt-oss", first.url, CHEAP), (served, second.url, EXPENSIVE))
        async with gateway(config) as running:
            _, key = await keys.issue(raw=True)
            for path, body in REQUESTS:
                response = await running.post(path, json.dumps(body).encode(), **bearing(key))
                assert response.status == 200, response.raw
                model_headers = (response.headers["x-unisono-model"], response.headers["x-unisono-served-model"])
                assert model_headers == ("gpt-oss", served)
            [usage] = (await running.get("/v1/usage", **bearing(key))).body["data"]
        assert (usage["model"], usage["served_model"], usage["requests"]) == ("gpt-oss", served, len(REQUESTS))
        expected_cost = 5 * usage["input_tokens"] + 500 * usage["output_tokens"]
        assert usage["cost_usd"] * 10**6 == pytest.approx(expected_cost)


async def test_a_primary_model_is_charged_at_its_own_price(address: str) -> None:
    async with FakeVllm(tokens=ANSWER) as first, FakeVllm(tokens=ANSWER) as second, ring(address) as keys:
        config = config_with("gpt-oss", address, ("gpt-oss", first.url, CHEAP), ("dear", second.url, EXPENSIVE))
        async with gateway(config) as running:
            # The budget covers the prompt and three tokens at the higher price, far more at the lower one.
            _, key = await keys.issue(limits=KeyLimits(money_budget=2_000))
            response = await running.post("/v1/chat/completions", json.dumps(CHAT).encode(), **bearing(key))
            assert response.status == 200, response.raw
            assert response.body["choices"][0]["finish_reason"] == "length"
            assert len(second.requests) == 0
            [usage] = (await running.get("/v1/usage", **bearing(key))).body["data"]
            expected_cost = usage["input_tokens"] + usage["output_tokens"]
            assert usage["cost_usd"] * 10**6 == pytest.approx(expected_cost)
            assert usage["served_model"] == "gpt-oss"
