"""Quotas of requests with several choices: all choices are one request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import Gateway, config_of
from tests.e2e.keyed import MASTER, bearing, keyed
from tests.fakes import FakeVllm, Refusal, VllmScript
from unisono.core.quotas import KeyLimits
from unisono.harmony.encoding import load_encoding

ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>Hi.<|return|>")
LONG = load_encoding().encode_marked("<|channel|>final<|message|>" + "la " * 60 + "<|return|>")
SIZE = len(ANSWER)


def priced(url: str, **sections: Any) -> dict[str, Any]:
    config = config_of(f"vllm@{url}", **sections)
    config["model_list"][0]["unisono"] = {"price": {"input": 1, "output": 1000}}
    return config


async def used_by(running: Gateway, key: str) -> dict[str, int]:
    total: dict[str, int] = (await running.get("/v1/usage", **bearing(key))).body["total"]
    return total


async def charged(running: Gateway, key: str) -> dict[str, int]:
    """Wait until the usage of an answer that broke off is recorded, and return the usage."""
    async with asyncio.timeout(10):
        while not (used := await used_by(running, key))["requests"]:
            await asyncio.sleep(0.05)
    return used


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "limits",
    [
        KeyLimits(rpm=1),
        KeyLimits(max_parallel=1),
        KeyLimits(money_budget=30 * SIZE * 1000),
        KeyLimits(token_budget=40 * SIZE + 500),
    ],
    ids=["rpm", "parallel", "money", "tokens"],
)
async def test_all_choices_need_one_reservation(limits: KeyLimits, stream: bool, tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=limits)
        answer = await running.chat_as(key, n=3, stream=stream)
        assert answer.status == 200
        used = await used_by(running, key)
        assert (used["requests"], used["errors"], used["output_tokens"]) == (1, 0, 3 * SIZE)
        sent = {each.json["max_tokens"] for each in fake.requests}
        assert len(fake.requests) == 3
        if limits.money_budget is not None:
            assert len(sent) == 1
            assert 9 * SIZE <= max(sent) <= 10 * SIZE
        if limits.max_parallel is not None:
            # The reservation ended with the last choice.
            assert (await running.chat_as(key, n=2)).status == 200
        if limits.rpm is not None:
            assert (await running.chat_as(key)).status == 429
            assert await used_by(running, key) == used


async def test_the_choices_of_all_prompts_are_one_request(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER) as fake:
        config = config_of(f"vllm@{fake.url}", unisono={"raw_completions": True})
        async with keyed(config, tmp_path) as (running, keys):
            _, key = await keys.issue(limits=KeyLimits(rpm=1, max_parallel=1), raw=True)
            body = {"model": "gpt-oss", "prompt": ["One", "Two"], "n": 2, "max_tokens": 9}
            answer = await running.post("/v1/completions", json.dumps(body).encode(), **bearing(key))
            assert answer.status == 200, answer.body
            assert len(answer.body["choices"]) == 4
            assert (await used_by(running, key))["requests"] == 1


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (KeyLimits(rpm=0), "limit of requests per minute"),
        (KeyLimits(tpm=50), "more tokens than this key has left"),
        (KeyLimits(money_budget=2500), "no room for an answer with 4 choices; request fewer choices in 'n'"),
        (KeyLimits(money_budget=10), "budget of this key is spent"),
    ],
)
async def test_a_refused_request_starts_no_choice_and_costs_nothing(
    limits: KeyLimits, message: str, tmp_path: Path
) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=limits)
        for stream in (False, True):
            answer = await running.chat_as(key, n=4, stream=stream)
            assert answer.status == 429
            assert message in answer.body["error"]["message"]
        assert not fake.requests
        assert await used_by(running, key) == await used_by(running, (await keys.issue())[1])


async def test_choices_without_tokens_need_no_room(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER) as fake:
        config = priced(fake.url, litellm_settings={"max_budget": 1})
        config["unisono"] = {"raw_completions": True}
        async with keyed(config, tmp_path) as (running, keys):
            _, key = await keys.issue(limits=KeyLimits(money_budget=10**6), raw=True)
            for sender in (key, MASTER):
                for extra in ({}, {"logprobs": 1}):
                    body = {"model": "gpt-oss", "prompt": ["One", "Two"], "max_tokens": 0, "echo": True, **extra}
                    answer = await running.post("/v1/completions", json.dumps(body).encode(), **bearing(sender))
                    assert answer.status == 200, answer.body
                    assert [choice["text"] for choice in answer.body["choices"]] == ["One", "Two"]


async def test_parallel_requests_with_several_choices_do_not_exceed_a_budget(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER, first_delay_s=0.3) as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=KeyLimits(money_budget=7 * SIZE * 1000))
        answers = await asyncio.gather(*(running.chat_as(key, n=3, max_tokens=SIZE) for _ in range(6)))
        accepted = sum(answer.status == 200 for answer in answers)
        assert 2 <= accepted <= 3
        used = await used_by(running, key)
        assert used["requests"] == accepted
        assert 6 * SIZE <= used["output_tokens"] <= 7 * SIZE


async def test_a_failed_choice_charges_the_usage_of_all_choices_once(tmp_path: Path) -> None:
    async with FakeVllm(tokens=LONG, delay_s=0.02) as fake:
        config = priced(fake.url, router_settings={"num_retries": 0})
        fake.script = lambda asked: Refusal(400) if asked.get("seed") == 9 else VllmScript(tokens=LONG, delay_s=0.02)
        async with keyed(config, tmp_path) as (running, keys):
            _, key = await keys.issue(limits=KeyLimits(max_parallel=1, money_budget=10**9))
            assert (await running.chat_as(key, n=3, seed=7)).status >= 400
            used = await charged(running, key)
            assert (used["requests"], used["errors"]) == (1, 1)
            assert (await running.chat_as(key)).status == 200


async def test_a_client_that_leaves_is_charged_once_for_all_choices(tmp_path: Path) -> None:
    async with FakeVllm(tokens=LONG, delay_s=0.05) as fake, keyed(priced(fake.url), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=KeyLimits(max_parallel=1, token_budget=10**6))
        body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}], "n": 3, "stream": True}
        url = f"{running.url}/v1/chat/completions"
        async with running.session.post(url, json=body, headers=bearing(key)) as response:
            async for _ in response.content:
                if len(fake.requests) == 3:
                    break
        used = await charged(running, key)
        assert (used["requests"], used["errors"]) == (1, 0)
        assert 0 < used["output_tokens"] < 3 * len(LONG)
        assert (await running.chat_as(key, max_tokens=1)).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_budget_of_the_gateway_is_charged_once_for_all_choices(stream: bool, tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER) as fake:
        # The budget has room for the choices of two requests, and for a part of a third request.
        config = priced(fake.url, litellm_settings={"max_budget": 7 * SIZE / 1000})
        async with keyed(config, tmp_path) as (running, _):
            for _ in range(2):
                assert (await running.chat_as(MASTER, n=3, stream=stream)).status == 200
            assert {each.json["max_tokens"] for each in fake.requests[:3]} == {7 * SIZE // 3 - 1}
            refused = await running.chat_as(MASTER, n=SIZE, stream=stream)
            assert refused.status == 429
            assert len(fake.requests) == 6
