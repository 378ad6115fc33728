"""Budgets that all keys share: `max_budget` of the gateway, and budgets by provider."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import config_of, gateway
from tests.e2e.keyed import MASTER, bearing, keyed
from tests.e2e.test_metrics import read
from tests.fakes import FakeVllm, Refusal, VllmScript, reset_at
from tests.fakes.openai_api import FakeOpenAi
from tests.fakes.sglang import FakeSglang
from unisono.app import build
from unisono.config import parse
from unisono.config.budget_settings import to_period
from unisono.core.budget_period import Period
from unisono.core.directory import DirectoryEntry, EntryKind
from unisono.core.quotas import KeyLimits
from unisono.errors import ConfigError
from unisono.harmony.encoding import load_encoding
from unisono.middleware.quota import MAX_TOKENS
from unisono.store import open_store

ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>Hi.<|return|>")
SIZE = len(ANSWER)
# In USD per million tokens. The prompts are free.
PRICE = {"output": 1000}
# Cost of an answer in USD.
COST = SIZE / 1000


def priced(config: dict[str, Any]) -> dict[str, Any]:
    for entry in config["model_list"]:
        entry["unisono"] = {"price": PRICE}
    return config


async def test_the_budget_of_the_gateway_ends_answers_and_then_refuses_requests(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER) as fake:
        config = priced(config_of(f"vllm@{fake.url}", litellm_settings={"max_budget": 2.5 * COST}))
        async with keyed(config, tmp_path) as (running, keys):
            _, first = await keys.issue()
            _, second = await keys.issue()
            for key in (first, second):
                assert (await running.chat_as(key)).body["choices"][0]["finish_reason"] == "stop"
            # The rest of the budget has room for a part of the next answer.
            assert fake.requests[0].json["max_tokens"] > fake.requests[-1].json["max_tokens"] > 0
            third = await running.chat_as(first)
            assert third.status == 200
            refused = await running.chat_as(second)
            assert refused.status == 429
            assert refused.body["error"]["code"] == "insufficient_quota"
            assert "budget of this gateway is spent" in refused.body["error"]["message"]
            # SDKs must not wait for the end of the period.
            assert refused.headers["x-should-retry"] == "false"
            # The key of the operator is no exception.
            assert (await running.chat_as(MASTER)).status == 429


async def test_parallel_requests_do_not_exceed_the_budget(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER, first_delay_s=0.5) as fake:
        config = priced(config_of(f"vllm@{fake.url}", litellm_settings={"max_budget": 4 * COST}))
        async with keyed(config, tmp_path) as (running, _):
            answers = await asyncio.gather(*(running.chat_as(MASTER, max_tokens=SIZE) for _ in range(12)))
            later = await running.chat_as(MASTER, max_tokens=SIZE)
        assert [answer.status for answer in answers].count(200) == 4
        # The running requests may cost less than was reserved for them, so the others may be tried again.
        refused = [answer for answer in answers if answer.status != 200]
        assert {(each.status, each.body["error"]["code"]) for each in refused} == {(429, "rate_limit_exceeded")}
        assert {each.headers["retry-after"] for each in refused} == {"1"}
        assert (later.status, later.body["error"]["code"]) == (429, "insufficient_quota")


async def test_the_usage_of_shared_budgets_is_not_counted_twice(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER) as fake:
        config = priced(config_of(f"vllm@{fake.url}", litellm_settings={"max_budget": 1}))
        async with keyed(config, tmp_path) as (running, _):
            await running.chat_as(MASTER)
            used = (await running.get("/v1/usage", **bearing(MASTER))).body["total"]
    assert (used["requests"], used["output_tokens"]) == (1, SIZE)


async def test_a_spent_provider_is_left_out() -> None:
    async with FakeVllm(tokens=ANSWER) as vllm, FakeSglang(tokens=ANSWER) as sglang:
        config = priced(config_of(f"vllm@{vllm.url}", f"sglang@{sglang.url}"))
        config["model_list"][0]["litellm_params"]["order"] = 0
        config["model_list"][1]["litellm_params"]["order"] = 1
        config["router_settings"] = {
            "provider_budget_config": {"hosted_vllm": {"budget_limit": 2 * COST, "time_period": "30d"}}
        }
        async with gateway(config) as running:
            assert running.app is not None
            await running.app.state.gateway.pool.wait_for_probes(5)
            backends = [(await running.chat(max_tokens=SIZE)).body["unisono"]["backend"] for _ in range(4)]
            assert backends == ["vllm-1", "vllm-1", "sglang-1", "sglang-1"]
            assert (await read(running.url))("quota_refusals_total") == 0


async def test_a_request_is_refused_if_all_providers_are_spent() -> None:
    async with FakeVllm(tokens=ANSWER) as vllm:
        config = priced(config_of(f"vllm@{vllm.url}"))
        config["router_settings"] = {"provider_budget_config": {"vllm": {"max_budget": COST}}}
        async with gateway(config) as running:
            assert (await running.chat(max_tokens=SIZE)).status == 200
            refused = await running.chat(max_tokens=SIZE)
            assert (refused.status, refused.body["error"]["code"]) == (429, "insufficient_quota")
            metrics = await read(running.url)
            assert metrics("quota_refusals_total", limit="money_budget", owner="provider") == 1


async def test_a_request_is_refused_if_all_deployments_with_its_tags_are_spent() -> None:
    async with FakeVllm(tokens=ANSWER) as vllm, FakeSglang(tokens=ANSWER) as sglang:
        config = priced(config_of(f"vllm@{vllm.url}", f"sglang@{sglang.url}"))
        for entry, tags in zip(config["model_list"], (["paid"], ["default"]), strict=True):
            entry["litellm_params"]["tags"] = tags
        config["router_settings"] = {
            "enable_tag_filtering": True,
            "provider_budget_config": {"vllm": {"max_budget": COST}},
        }
        async with gateway(config) as running:
            assert running.app is not None
            await running.app.state.gateway.pool.wait_for_probes(5)
            assert (await running.chat(max_tokens=SIZE, tags=["paid"])).status == 200
            refused = await running.chat(max_tokens=SIZE, tags=["paid"])
            assert (refused.status, refused.body["error"]["code"]) == (429, "insufficient_quota")
            other = await running.chat(max_tokens=SIZE)
            assert (other.status, other.body["unisono"]["backend"]) == (200, "sglang-1")


async def test_after_a_failover_each_provider_pays_for_what_it_generated() -> None:
    async with FakeVllm(tokens=ANSWER, faults=(reset_at(3),)) as vllm, FakeSglang(tokens=ANSWER[3:]) as sglang:
        config = priced(config_of(f"vllm@{vllm.url}", f"sglang@{sglang.url}"))
        for order, entry in enumerate(config["model_list"]):
            entry["litellm_params"]["order"] = order
        providers = {kind: {"max_budget": 2 * COST} for kind in ("vllm", "sglang")}
        config["router_settings"] = {"provider_budget_config": providers, "allowed_fails": 1_000}
        async with gateway(config) as running:
            assert running.app is not None
            await running.app.state.gateway.pool.wait_for_probes(5)
            first = await running.chat(max_tokens=SIZE, stream=True)
            assert (first.status, first.events[-1]["unisono"]["failovers"]) == (200, 1)
            vllm.script = lambda _: VllmScript(tokens=ANSWER)
            # Both have the rest of their own budget: 2 * SIZE - 3 tokens, and 2 * SIZE - (SIZE - 3) tokens.
            await running.chat()
            assert vllm.requests[-1].json["max_tokens"] == SIZE + 3
        assert SIZE > 4


async def test_a_provider_pays_for_what_it_generated_before_another_one_failed() -> None:
    async with FakeVllm(tokens=ANSWER, faults=(reset_at(3),)) as vllm, FakeSglang(tokens=ANSWER) as sglang:
        config = priced(config_of(f"vllm@{vllm.url}", f"sglang@{sglang.url}"))
        for order, entry in enumerate(config["model_list"]):
            entry["litellm_params"]["order"] = order
        providers = {"vllm": {"max_budget": 2 * COST}, "sglang": {"max_budget": 9 * COST}}
        config["router_settings"] = {"provider_budget_config": providers, "allowed_fails": 1_000, "num_retries": 1}
        async with gateway(config) as running:
            assert running.app is not None
            await running.app.state.gateway.pool.wait_for_probes(5)
            sglang.script = lambda _: Refusal(500)
            await running.chat(max_tokens=SIZE, stream=True)
            vllm.script = lambda _: VllmScript(tokens=ANSWER)
            before = len(vllm.requests)
            await running.chat()
            assert len(vllm.requests) > before
            assert vllm.requests[-1].json["max_tokens"] < 2 * SIZE


async def test_all_choices_of_a_pass_through_request_share_what_is_reserved() -> None:
    async with FakeOpenAi() as fake:
        config = priced(config_of(f"vllm@{fake.url}", name="llama", litellm_settings={"max_budget": 10_000}))
        async with gateway(config) as running:
            assert (await running.chat(model="llama", n=4)).status == 200
        assert fake.requests[-1].json["max_tokens"] * 4 <= MAX_TOKENS


async def test_a_failed_answer_counts_what_it_generated(tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/state.db"
    async with FakeVllm(script=lambda _: Refusal(500)) as fake:
        config = priced(config_of(f"vllm@{fake.url}", litellm_settings={"max_budget": COST}))
        config["store"] = {"url": store}
        async with gateway(config) as running:
            for _ in range(3):
                # The reservation of a failed request is given back.
                assert (await running.chat(max_tokens=SIZE)).status in (502, 503)
    opened = open_store(store, deadline_s=5)
    await opened.start()
    lines = await opened.ledger("2000-01-01", "2999-01-01")
    await opened.aclose()
    assert sum(line.used.cost for line in lines) == 0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"litellm_settings": {"max_budget": 1}}, "litellm_settings.max_budget: the models have no prices"),
        (
            {"router_settings": {"provider_budget_config": {"vllm": {"budget_limit": 1}}}},
            "router_settings.provider_budget_config.vllm: the models have no prices",
        ),
        (
            {"router_settings": {"provider_budget_config": {"azure": {"budget_limit": 1}}}},
            "router_settings.provider_budget_config.azure: no entry of `model_list`",
        ),
        ({"router_settings": {"provider_budget_config": {"vllm": {}}}}, "must have either `budget_limit`"),
        ({"litellm_settings": {"max_budget": 1, "budget_duration": "2x"}}, "litellm_settings.budget_duration"),
    ],
    ids=str,
)
def test_a_budget_without_effect_is_an_error(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build(parse(config_of("vllm@http://127.0.0.1:1", **sections), {}).config)
    assert message in str(raised.value)


def test_zero_means_no_budget() -> None:
    build(parse(config_of("vllm@http://127.0.0.1:1", litellm_settings={"max_budget": 0}), {}).config)


@pytest.mark.parametrize(
    ("text", "period"),
    [
        ("30s", Period("every", 30)),
        ("2h", Period("every", 7200)),
        ("1d", Period("every", 86400)),
        ("1mo", Period("month")),
        ("2mo", Period("every", 60 * 86400)),
    ],
)
def test_durations(text: str, period: Period) -> None:
    assert to_period(text) == period


@pytest.mark.parametrize("text", ["", "0d", "d", "1y", "1.5h", "999999mo", "999999w", 30])
def test_invalid_durations(text: Any) -> None:
    with pytest.raises(ValueError, match="must be a number and a unit"):
        to_period(text)


async def test_providers_of_one_kind_have_separate_budgets() -> None:
    async with FakeVllm(tokens=ANSWER) as hosted, FakeVllm(tokens=ANSWER) as plain:
        config = priced(config_of(f"hosted_vllm@{hosted.url}", f"vllm@{plain.url}"))
        for order, entry in enumerate(config["model_list"]):
            entry["litellm_params"]["order"] = order
        budgets = {"hosted_vllm": {"max_budget": COST}, "vllm": {"max_budget": 2 * COST}}
        config["router_settings"] = {"provider_budget_config": budgets}
        async with gateway(config) as running:
            assert running.app is not None
            await running.app.state.gateway.pool.wait_for_probes(5)
            backends = [(await running.chat(max_tokens=SIZE)).body["unisono"]["backend"] for _ in range(3)]
            refused = await running.chat(max_tokens=SIZE)
    assert backends == ["vllm-1", "vllm-2", "vllm-2"]
    assert refused.status == 429
    text = "The budget of the provider `hosted_vllm` and the provider `vllm` is spent; ask the operator to raise it."
    assert refused.body["error"]["message"] == text


@pytest.mark.parametrize(
    ("budgets", "spent"), [(["hosted_vllm"], "hosted_vllm"), (["vllm"], "vllm"), (["hosted_vllm", "vllm"], "vllm")]
)
async def test_only_a_second_budget_for_a_kind_has_a_new_account(
    budgets: list[str], spent: str, tmp_path: Path
) -> None:
    async with FakeVllm(tokens=ANSWER) as fake:
        used = priced(config_of(f"vllm@{fake.url}"))
        used["store"] = {"url": f"sqlite://{tmp_path}/state.db"}
        used["router_settings"] = {"provider_budget_config": {"vllm": {"max_budget": COST}}}
        async with gateway(used) as running:
            assert (await running.chat(max_tokens=SIZE)).status == 200
        config = priced(config_of(*(f"{provider}@{fake.url}" for provider in budgets)))
        for provider, entry in zip(budgets, config["model_list"], strict=True):
            entry["model_name"] = f"gpt-oss-{provider}"
        config["store"] = used["store"]
        config["router_settings"] = {"provider_budget_config": {each: {"max_budget": COST} for each in budgets}}
        async with gateway(config) as running:
            answers = [await running.chat(model=f"gpt-oss-{provider}", max_tokens=SIZE) for provider in budgets]
    assert [answer.status for answer in answers] == [429 if provider == spent else 200 for provider in budgets]
    text = f"The budget of the provider `{spent}` is spent; ask the operator to raise it."
    assert answers[-1].body["error"]["message"] == text


async def test_messages_name_the_provider_whose_budget_is_too_small() -> None:
    async with FakeVllm(tokens=ANSWER, first_delay_s=0.5) as vllm:
        config = priced(config_of(f"vllm@{vllm.url}", litellm_settings={"max_budget": 1000}))
        config["router_settings"] = {"provider_budget_config": {"vllm": {"max_budget": 1.5 * COST}}}
        async with gateway(config) as running:
            first = asyncio.create_task(running.chat(max_tokens=2 * SIZE))
            async with asyncio.timeout(5):
                while not vllm.requests:
                    await asyncio.sleep(0.01)
            waiting = await running.chat(max_tokens=SIZE)
            assert (await first).status == 200
            cut = await running.chat()
    text = (
        "Running requests have reserved the rest of the budget of the provider `vllm`; try again when they have ended."
    )
    assert waiting.body["error"]["message"] == text
    unmet = "The remaining budget of the provider `vllm` was too small for a longer answer."
    assert cut.body["unisono"]["unmet"] == unmet


async def test_a_cut_answer_names_the_owners_of_its_budgets(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER) as vllm, keyed(config_of(f"vllm@{vllm.url}"), tmp_path) as (running, keys):
        sent = (await running.chat_as(MASTER)).body["usage"]["prompt_tokens"]
        limits = KeyLimits(token_budget=sent + SIZE - 1)
        team = DirectoryEntry(EntryKind.TEAM, "ants", time.time(), limits=limits)
        await keys.store.put_entry(team)
        _, key = await keys.issue("ants")
        answer = await running.chat_as(key)
    assert answer.body["unisono"]["unmet"] == "The budget of this team had no room for a longer answer."
