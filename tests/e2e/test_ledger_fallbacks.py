"""A fallback is charged at its own price, and ledger, usage and headers name both models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract.servers import Server
from tests.e2e.gateway import config_of, gateway
from tests.e2e.keyed import bearing, ring, with_keys
from tests.fakes import FakeVllm, Refusal
from unisono.core.access import KeyLimits
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
CHEAP, DEAR = {"input": 1.0, "output": 1.0}, {"input": 5.0, "output": 500.0}


def broken(asked: Any) -> Refusal:
    return Refusal(500, b'{"error":"broken"}')


def configured(name: str, address: str, *models: tuple[str, str, dict[str, float]]) -> dict[str, Any]:
    """Models by name, backend and price; the first falls back to the last."""
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


@pytest.mark.parametrize("other", ["dear", "gpt-oss"], ids=["fallback", "mixed group"])
async def test_an_answer_costs_what_its_deployment_costs(address: str, other: str) -> None:
    async with FakeVllm(script=broken) as first, FakeVllm(tokens=ANSWER) as second, ring(address) as keys:
        config = configured("gpt-oss", address, ("gpt-oss", first.url, CHEAP), (other, second.url, DEAR))
        async with gateway(config) as running:
            _, key = await keys.issue(raw=True)
            for path, body in REQUESTS:
                answer = await running.post(path, json.dumps(body).encode(), **bearing(key))
                assert answer.status == 200, answer.raw
                named = (answer.headers["x-unisono-model"], answer.headers["x-unisono-served-model"])
                assert named == ("gpt-oss", other)
            [line] = (await running.get("/v1/usage", **bearing(key))).body["data"]
        assert (line["model"], line["served_model"], line["requests"]) == ("gpt-oss", other, len(REQUESTS))
        spent = 5 * line["input_tokens"] + 500 * line["output_tokens"]
        assert line["cost_usd"] * 10**6 == pytest.approx(spent)


async def test_the_requested_model_is_charged_at_its_own_price_and_a_budget_covers_any(address: str) -> None:
    async with FakeVllm(tokens=ANSWER) as first, FakeVllm(tokens=ANSWER) as second, ring(address) as keys:
        config = configured("gpt-oss", address, ("gpt-oss", first.url, CHEAP), ("dear", second.url, DEAR))
        async with gateway(config) as running:
            # Room for the prompt and three tokens at the higher price; for far more at the lower one.
            _, tight = await keys.issue(limits=KeyLimits(money_budget=2_000))
            answer = await running.post("/v1/chat/completions", json.dumps(CHAT).encode(), **bearing(tight))
            assert answer.status == 200, answer.raw
            assert answer.body["choices"][0]["finish_reason"] == "length"
            assert len(second.requests) == 0
            [line] = (await running.get("/v1/usage", **bearing(tight))).body["data"]
            spent = line["input_tokens"] + line["output_tokens"]
            assert line["cost_usd"] * 10**6 == pytest.approx(spent)
            assert line["served_model"] == "gpt-oss"
