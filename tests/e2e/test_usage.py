"""The usage ledger: equal to the reported usage, visible to each key and to the operator."""

from __future__ import annotations

import asyncio
import csv
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from tests.e2e.gateway import config_of
from tests.e2e.keyed import MASTER, bearing, keyed, ring, with_keys
from tests.e2e.replicas import replica
from tests.fakes import FakeVllm, Refusal, VllmScript
from tests.fakes.faults import reset_at, stall_at
from unisono.cli import main
from unisono.core.quotas import KeyLimits
from unisono.harmony.encoding import load_encoding

pytestmark = pytest.mark.timeout(120)

LONG = load_encoding().encode_marked("<|channel|>final<|message|>" + "la " * 60 + "<|return|>")
CHAT = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
BAD_DAYS = ("", "today", "2026-13-01", "20261121", "2026-11-21T00:00", "' OR 1=1 --")


async def test_each_key_sees_its_own_usage_and_the_operator_sees_all(tmp_path: Path) -> None:
    async with FakeVllm(tokens=LONG) as fake:
        config = config_of(f"vllm@{fake.url}")
        config["model_list"][0]["unisono"] = {"price": {"input": 1.0, "output": 10.0}}
        async with keyed(config, tmp_path) as (running, keys):
            record, ann_key = await keys.issue("ann")
            _, other_key = await keys.issue("ann")
            usages = []
            for body in ({**CHAT}, {**CHAT, "max_tokens": 7}):
                response = await running.post("/v1/chat/completions", json.dumps(body).encode(), **bearing(ann_key))
                usages.append(response.body["usage"])
            response_body = json.dumps({"model": "gpt-oss", "input": "Hi"}).encode()
            master_response = await running.post("/v1/responses", response_body, **bearing(MASTER))
            input_tokens = sum(usage["prompt_tokens"] for usage in usages)
            output_tokens = sum(usage["completion_tokens"] for usage in usages)
            for path in ("/v1/usage", "/usage"):
                report = (await running.get(path, **bearing(ann_key))).body
                assert report["key"] == record.id
                [usage_line] = report["data"]
                assert report["total"] == {name: usage_line[name] for name in report["total"]}
                assert (usage_line["model"], usage_line["requests"], usage_line["errors"]) == ("gpt-oss", 2, 0)
                assert (usage_line["input_tokens"], usage_line["output_tokens"]) == (input_tokens, output_tokens)
                assert usage_line["cost_usd"] == pytest.approx((input_tokens + 10 * output_tokens) / 1e6)
                assert (await running.get(path, **bearing(other_key))).body["data"] == []
            for day in BAD_DAYS:
                rejected = await running.get(f"/v1/usage?since={day}", **bearing(ann_key))
                assert (rejected.status, rejected.body["error"]["param"]) == (400, "since")
            rejected = await running.get("/v1/usage?until=2020-01-01&since=2020-01-02", **bearing(ann_key))
            assert (rejected.status, rejected.body["error"]["param"]) == (400, "until")
            before = (await running.get("/v1/usage?until=2020-01-30", **bearing(ann_key))).body
            assert (before["since"], before["data"]) == ("2020-01-01", [])
            past = (await running.get("/v1/usage?until=2020-01-01&since=2019-01-01", **bearing(ann_key))).body
            assert (past["data"], past["total"]["requests"]) == ([], 0)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(with_keys(config, f"sqlite://{tmp_path}/state.db")))
        rows: list[dict[str, Any]] = json.loads(await usage_command(path, "--json"))
        assert [usage_line["key"] for usage_line in rows] == ["(default)", record.id]
        assert rows[0]["total_tokens"] == master_response.body["usage"]["total_tokens"]
        assert rows[1]["total_tokens"] == input_tokens + output_tokens
        [tenant] = [
            row
            for row in csv.DictReader((await usage_command(path, "--csv", "--by", "tenant")).splitlines())
            if row["tenant"] == "ann"
        ]
        assert (tenant["requests"], tenant["output_tokens"]) == ("2", str(output_tokens))
        table = (await usage_command(path, "--by", "model")).splitlines()
        assert table[0].split()[:2] == ["MODEL", "REQUESTS"]
        assert [usage_line.split()[:2] for usage_line in table[1:]] == [["gpt-oss", "3"], ["TOTAL", "3"]]
        assert "█" * 40 in await usage_command(path, "--chart")
        assert json.loads(await usage_command(path, "--json", "--until", "2020-01-01")) == []
        # A period that ends before it begins is a mistake.
        command = ["usage", "--config", str(path), "--since", "2020-01-02", "--until", "2020-01-01"]
        result = await asyncio.to_thread(CliRunner().invoke, main, command)
        assert (result.exit_code, "is before --since" in result.output) == (2, True)


THOUGHT = load_encoding().encode_marked("so " * 30)
UNFINISHED = load_encoding().encode_marked(
    "<|channel|>analysis<|message|>" + "so " * 30 + "<|end|><|start|>assistant<|channel|>final<|message|>" + "la " * 30
)


@pytest.mark.parametrize("leaves", [False, True], ids=["backend breaks", "client disconnects"])
async def test_usage_of_an_unfinished_answer_includes_its_reasoning(leaves: bool, tmp_path: Path) -> None:
    last = len(UNFINISHED) - 5
    script = VllmScript(tokens=UNFINISHED, faults=(stall_at(last) if leaves else reset_at(last),))
    streamed = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with FakeVllm(script=lambda _: script) as fake:
        config = config_of(f"vllm@{fake.url}", router_settings={"num_retries": 0})
        async with keyed(config, tmp_path) as (running, keys), aiohttp.ClientSession() as session:
            _, key = await keys.issue("ann")
            reported = None
            url = f"{running.url}/v1/chat/completions"
            async with session.post(url, json=streamed, headers=bearing(key)) as answer:
                async for line in answer.content:
                    chunk = json.loads(line[6:]) if line.startswith(b"data: {") else {}
                    reported = chunk.get("usage") or reported
                    if leaves and any(choice["delta"].get("content") for choice in chunk.get("choices", ())):
                        break
            async with asyncio.timeout(10):
                while not (usage := (await running.get("/v1/usage", **bearing(key))).body["total"])["requests"]:
                    await asyncio.sleep(0.05)
            async with asyncio.timeout(10):
                while not (records := (await running.get("/v1/requests", **bearing(key))).body["data"]):
                    await asyncio.sleep(0.05)
    assert records[0]["reasoning_tokens"] == usage["reasoning_tokens"] == len(THOUGHT)
    assert len(THOUGHT) < records[0]["output_tokens"] == usage["output_tokens"]
    if not leaves:
        assert reported is not None
        assert reported["completion_tokens_details"]["reasoning_tokens"] == len(THOUGHT)


FAULTS: dict[str, Refusal | VllmScript] = {
    **{str(status): Refusal(status, b"{}") for status in (400, 404, 429, 500)},
    "reset": VllmScript(tokens=LONG, faults=(reset_at(0),)),
}


@pytest.mark.parametrize("model", ["gpt-oss", "other"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_request_that_fails_before_its_first_token_is_not_charged(
    fault: str, model: str, tmp_path: Path
) -> None:
    async with FakeVllm(script=lambda _: FAULTS[fault]) as fake:
        price = {"unisono": {"price": {"input": 1.0, "output": 10.0}}}
        config = config_of(
            f"vllm@{fake.url}",
            router_settings={"allowed_fails": 100, "num_retries": 0},
            litellm_settings={"max_budget": 0.001, "budget_duration": "1d"},
        )
        [first] = config["model_list"]
        config["model_list"] = [{**first, **price}, {**first, **price, "model_name": "other"}]
        config["model_list"][1]["litellm_params"] = {"model": "vllm/other", "api_base": f"{fake.url}/v1"}
        async with keyed(config, tmp_path) as (running, keys):
            # The budgets have room for two prompts.
            _, key = await keys.issue(limits=KeyLimits(token_budget=150))
            chat = json.dumps({**CHAT, "model": model, "max_tokens": 4}).encode()
            errors = [await running.post("/v1/chat/completions", chat, **bearing(key)) for _ in range(5)]
            assert {each.body["error"]["code"] for each in errors}.isdisjoint({"insufficient_quota", None})
            async with asyncio.timeout(10):
                # The usage of a failed request is written after its answer.
                while (usage := (await running.get("/v1/usage", **bearing(key))).body["total"])["requests"] < 5:
                    await asyncio.sleep(0.05)
            assert (usage["errors"], usage["total_tokens"], usage["cost_usd"]) == (5, 0, 0)
            async with asyncio.timeout(10):
                while len(found := (await running.get("/v1/requests", **bearing(key))).body["data"]) < 5:
                    await asyncio.sleep(0.05)
            assert [each for each in found if "cost" in each or "input_tokens" in each] == []


async def usage_command(config: Path, *arguments: str) -> str:
    command = ["usage", "--config", str(config), *arguments]
    result = await asyncio.to_thread(CliRunner().invoke, main, command)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
async def test_reported_usage_is_in_the_ledger_after_the_gateway_is_killed(tmp_path: Path) -> None:
    address = f"sqlite://{tmp_path}/state.db"
    async with FakeVllm(tokens=LONG, delay_s=0.002) as fake, ring(address) as keys:
        _, key = await keys.issue()
        config = with_keys(config_of(f"vllm@{fake.url}"), address)
        reported: list[int] = []
        max_unreported = 0

        async def client(session: aiohttp.ClientSession, url: str) -> None:
            while True:
                async with session.post(f"{url}/v1/chat/completions", json=CHAT, headers=bearing(key)) as response:
                    reported.append((await response.json())["usage"]["total_tokens"])

        for number in range(2):
            async with (
                replica(tmp_path / f"{number}", config) as replica_,
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
            ):
                clients = [asyncio.create_task(client(session, replica_.url)) for _ in range(8)]
                await asyncio.sleep(1.0 + 0.137 * number)
                replica_.kill()
                await asyncio.gather(*clients, return_exceptions=True)
            max_unreported += 8
            entries = await keys.store.ledger("0000", "9999")
            assert len(reported) >= 8
            requests = sum(entry.used.requests for entry in entries)
            tokens = sum(entry.used.tokens for entry in entries)
            # Requests that were running may be in the ledger without a reported usage.
            assert len(reported) <= requests <= len(reported) + max_unreported
            assert sum(reported) <= tokens <= sum(reported) + max_unreported * max(reported)
