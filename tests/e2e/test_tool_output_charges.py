"""Charges for the results of server tools, which the model reads as input."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import config_of
from tests.e2e.hosting import DOCS, calls, hosts
from tests.e2e.keyed import MASTER, bearing, keyed
from tests.e2e.responses import ANSWER, Line
from tests.e2e.wires import WIRES
from tests.fakes import FakeVllm, Refusal
from tests.mcp.conftest import Upstream
from unisono.core.quotas import KeyLimits

# USD per million input tokens. The output is free.
PRICE = 100
TEXT = "word " * 300


@pytest.mark.parametrize("fails", [False, True], ids=["completed", "failed"])
async def test_results_of_server_tools_are_charged_as_input(fails: bool, upstream: Upstream, tmp_path: Path) -> None:
    async with FakeVllm() as fake:
        config = config_of(f"vllm@{fake.url}", **hosts(upstream))
        config["model_list"][0]["unisono"] = {"price": {"input": PRICE}}
        async with keyed(config, tmp_path) as (running, keys):
            _, key = await keys.issue(limits=KeyLimits(token_budget=1000))
            harness = Line(WIRES["vllm"], fake, running, more={"tools": [DOCS]})
            harness.say(calls("echo", text=TEXT), ANSWER)
            script: Any = fake.script
            if fails:
                fake.script = lambda asked: Refusal(400) if len(fake.requests) > 1 else script(asked)
            response = await harness.post(headers=bearing(key), max_output_tokens=900)
            async with asyncio.timeout(10):
                while not (total := (await running.get("/v1/usage", **bearing(key))).body["total"])["requests"]:
                    await asyncio.sleep(0.05)
            if fails:
                assert total["errors"] == 1
                assert total["input_tokens"] > 300
            else:
                usage = response.body["usage"]
                results = usage["output_tokens_details"]["tool_output_tokens"]
                assert results > 300
                assert total["input_tokens"] == usage["input_tokens"] + results
            assert total["cost_usd"] == pytest.approx(total["input_tokens"] * PRICE / 1e6)
            # All reports contain the same number of input tokens, and the same cost.
            async with asyncio.timeout(10):
                while not (records := (await running.get("/v1/requests", **bearing(MASTER))).body["data"]):
                    await asyncio.sleep(0.05)
            record = records[-1]
            assert (record["input_tokens"], record["cost"]) == (total["input_tokens"], total["cost_usd"])
            [log] = (await running.get("/spend/logs?summarize=false", **bearing(MASTER))).body
            assert (log["prompt_tokens"], log["spend"]) == (total["input_tokens"], total["cost_usd"])
            # The results are part of the spent budget.
            refused = await running.chat_as(key, max_tokens=900)
            assert refused.status == 429 or refused.body["usage"]["completion_tokens"] < 500
