"""Charges and limits of an answer that follows a compaction: two generations, but one request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import Gateway, config_of
from tests.e2e.keyed import bearing, keyed
from tests.fakes import FakeVllm, VllmScript
from unisono.core.quotas import KeyLimits
from unisono.harmony.encoding import load_encoding

Json = dict[str, Any]

ENCODING = load_encoding()
ANSWER = ENCODING.encode_marked("<|channel|>final<|message|>Hello.<|return|>")
SUMMARY = ENCODING.encode_marked("<|channel|>final<|message|>They asked for tea, and the pot is empty.<|return|>")
HISTORY = [
    {"role": "user", "content": "Is there tea?"},
    {"role": "assistant", "content": "The pot is empty. " * 400},
    {"role": "user", "content": "Then make some."},
]
RESPONSE: Json = {"input": HISTORY, "context_management": [{"type": "compaction", "compact_threshold": 1000}]}
EDIT: Json = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 1000}}
MESSAGE: Json = {"messages": HISTORY, "max_tokens": 1000, "context_management": {"edits": [EDIT]}}
REQUESTS: dict[str, tuple[str, Json]] = {
    "responses": ("/v1/responses", RESPONSE),
    "responses stream": ("/v1/responses", {**RESPONSE, "stream": True}),
    "background": ("/v1/responses", {**RESPONSE, "background": True}),
    "messages": ("/v1/messages", MESSAGE),
}
# Prices in USD per million tokens.
PRICE = {"input": 1, "output": 1000}


def script(body: Json) -> VllmScript:
    is_summary = "Sum up our conversation" in ENCODING.decode(body["prompt"])
    return VllmScript(tokens=SUMMARY if is_summary else ANSWER)


async def ended(running: Gateway, key: str, created: Json) -> Json:
    while created["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.05)
        created = (await running.get(f"/v1/responses/{created['id']}", **bearing(key))).body
    return created


@pytest.mark.parametrize(("path", "body"), REQUESTS.values(), ids=REQUESTS)
async def test_summary_and_answer_are_charged_as_one_request(path: str, body: Json, tmp_path: Path) -> None:
    async with FakeVllm(script=script) as fake:
        config = config_of(f"vllm@{fake.url}")
        config["model_list"][0]["unisono"] = {"price": PRICE}
        async with keyed(config, tmp_path) as (running, keys):
            _, key = await keys.issue(limits=KeyLimits(rpm=1, max_parallel=1, money_budget=10_000_000))
            answer = await running.post(path, json.dumps({"model": "gpt-oss", **body}).encode(), **bearing(key))
            assert answer.status == 200
            if body.get("background"):
                assert (await ended(running, key, answer.body))["status"] == "completed"
            used = (await running.get("/v1/usage", **bearing(key))).body["total"]
            sent = [len(each.json["prompt"]) for each in fake.requests if each.path == "/v1/completions"]
            assert len(sent) == 2
            generated = len(SUMMARY) + len(ANSWER)
            assert (used["requests"], used["errors"]) == (1, 0)
            assert (used["input_tokens"], used["output_tokens"]) == (sum(sent), generated)
            cost = (sum(sent) * PRICE["input"] + generated * PRICE["output"]) / 1e6
            assert used["cost_usd"] == pytest.approx(cost)


@pytest.mark.parametrize(("path", "body"), REQUESTS.values(), ids=REQUESTS)
async def test_no_limit_refuses_the_answer_after_a_summary(path: str, body: Json, tmp_path: Path) -> None:
    # Each limit has room for the summary only.
    limits = KeyLimits(rpm=1, tpm=4_000, token_budget=3_000)
    async with FakeVllm(script=script) as fake, keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=limits)
        sent = json.dumps({"model": "gpt-oss", **body}).encode()
        answer = await running.post(path, sent, **bearing(key))
        assert answer.status == 200
        if body.get("background"):
            assert (await ended(running, key, answer.body))["status"] == "completed"
        assert "Hello." in answer.raw.decode() or body.get("background")
        refused = await running.post(path, sent, **bearing(key))
        assert (refused.status, len(fake.requests)) == (429, 2)
