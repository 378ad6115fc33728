"""Prices and budgets that a request reserves if deployments of different prices may answer it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import config_of, gateway
from tests.e2e.keyed import keyed
from tests.fakes import FakeVllm
from unisono.core.quotas import KeyLimits
from unisono.harmony.encoding import load_encoding

ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>Hi.<|return|>")
SIZE = len(ANSWER)
# In USD per million tokens. The prompts are free.
CHEAP, DEAR = 1, 1000


def config(cheap: FakeVllm, dear: FakeVllm, names: tuple[str, str], **router: Any) -> dict[str, Any]:
    """Return a configuration with a cheap and an expensive deployment, of the models `names`."""
    built = config_of(f"vllm@{cheap.url}", f"hosted_vllm@{dear.url}", router_settings=router)
    for order, (entry, name, price) in enumerate(zip(built["model_list"], names, (CHEAP, DEAR), strict=True)):
        entry["model_name"] = name
        entry["litellm_params"]["order"] = order
        entry["unisono"] = {"price": {"output": price}}
        entry["model_info"] = {"harmony": True}
    return built


@pytest.mark.parametrize("fields", [{"disable_fallbacks": True}, {"fallbacks": []}], ids=str)
async def test_a_request_without_fallbacks_reserves_only_the_price_of_its_model(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    async with FakeVllm(tokens=ANSWER) as cheap, FakeVllm(tokens=ANSWER) as dear:
        built = config(cheap, dear, ("gpt-oss", "gpt-oss-large"), fallbacks=[{"gpt-oss": ["gpt-oss-large"]}])
        async with keyed(built, tmp_path) as (running, keys):
            # At the price of the fallback, this budget would have no room for one token.
            _, key = await keys.issue(limits=KeyLimits(money_budget=SIZE * CHEAP))
            assert (await running.chat_as(key)).status == 429
            answer = await running.chat_as(key, **fields)
    assert (answer.status, answer.body["choices"][0]["finish_reason"]) == (200, "stop")


async def test_a_provider_reserves_only_the_prices_of_its_own_deployments() -> None:
    async with FakeVllm(tokens=ANSWER) as cheap, FakeVllm(tokens=ANSWER) as dear:
        budgets = {"vllm": {"max_budget": 2 * SIZE * CHEAP / 1e6}, "hosted_vllm": {"max_budget": 10}}
        built = config(cheap, dear, ("gpt-oss", "gpt-oss"), provider_budget_config=budgets)
        async with gateway(built) as running:
            answers = [await running.chat(max_tokens=SIZE) for _ in range(3)]
    assert [each.body["choices"][0]["finish_reason"] for each in answers] == ["stop"] * 3
    assert [each.body["unisono"]["backend"] for each in answers] == ["vllm-1", "vllm-1", "vllm-2"]
