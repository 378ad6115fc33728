"""The ledger: what clients saw as usage is in it, and it is told to each key and to the operator."""

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
from tests.fakes import FakeVllm
from unisono.cli import main
from unisono.harmony.encoding import load_encoding

pytestmark = pytest.mark.timeout(120)

LONG = load_encoding().encode_marked("<|channel|>final<|message|>" + "la " * 60 + "<|return|>")
CHAT = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
BAD_DAYS = ("", "today", "2026-13-01", "20261121", "2026-11-21T00:00", "' OR 1=1 --")


async def test_each_key_sees_its_own_usage_and_the_operator_all(tmp_path: Path) -> None:
    async with FakeVllm(tokens=LONG) as fake:
        config = config_of(f"vllm@{fake.url}")
        config["model_list"][0]["unisono"] = {"price": {"input": 1.0, "output": 10.0}}
        async with keyed(config, tmp_path) as (running, keys):
            record, mine = await keys.issue("ann")
            _, other = await keys.issue("ann")
            usages = []
            for body in ({**CHAT}, {**CHAT, "max_tokens": 7}):
                answer = await running.post("/v1/chat/completions", json.dumps(body).encode(), **bearing(mine))
                usages.append(answer.body["usage"])
            responded = json.dumps({"model": "gpt-oss", "input": "Hi"}).encode()
            by_master = await running.post("/v1/responses", responded, **bearing(MASTER))
            sent = sum(usage["prompt_tokens"] for usage in usages)
            made = sum(usage["completion_tokens"] for usage in usages)
            for path in ("/v1/usage", "/usage"):
                told = (await running.get(path, **bearing(mine))).body
                assert told["key"] == record.id
                [line] = told["data"]
                assert told["total"] == {name: line[name] for name in told["total"]}
                assert (line["model"], line["requests"], line["errors"]) == ("gpt-oss", 2, 0)
                assert (line["input_tokens"], line["output_tokens"]) == (sent, made)
                assert line["cost_usd"] == pytest.approx((sent + 10 * made) / 1e6)
                assert (await running.get(path, **bearing(other))).body["data"] == []
            for day in BAD_DAYS:
                refused = await running.get(f"/v1/usage?since={day}", **bearing(mine))
                assert (refused.status, refused.body["error"]["param"]) == (400, "since")
            past = (await running.get("/v1/usage?until=2020-01-01&since=2019-01-01", **bearing(mine))).body
            assert (past["data"], past["total"]["requests"]) == ([], 0)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(with_keys(config, f"sqlite://{tmp_path}/state.db")))
        shown: list[dict[str, Any]] = json.loads(await printed(path, "--json"))
        assert [line["key"] for line in shown] == ["(default)", record.id]
        assert shown[0]["total_tokens"] == by_master.body["usage"]["total_tokens"]
        assert shown[1]["total_tokens"] == sent + made
        [tenant] = [
            row
            for row in csv.DictReader((await printed(path, "--csv", "--by", "tenant")).splitlines())
            if row["tenant"] == "ann"
        ]
        assert (tenant["requests"], tenant["output_tokens"]) == ("2", str(made))
        table = (await printed(path, "--by", "model")).splitlines()
        assert table[0].split()[:2] == ["MODEL", "REQUESTS"]
        assert [line.split()[:2] for line in table[1:]] == [["gpt-oss", "3"], ["TOTAL", "3"]]
        assert "█" * 40 in await printed(path, "--chart")
        assert json.loads(await printed(path, "--json", "--until", "2020-01-01")) == []


async def printed(config: Path, *arguments: str) -> str:
    asked = ["usage", "--config", str(config), *arguments]
    result = await asyncio.to_thread(CliRunner().invoke, main, asked)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
async def test_what_was_acknowledged_is_in_the_ledger_when_the_gateway_is_killed(tmp_path: Path) -> None:
    address = f"sqlite://{tmp_path}/state.db"
    async with FakeVllm(tokens=LONG, delay_s=0.002) as fake, ring(address) as keys:
        _, key = await keys.issue()
        config = with_keys(config_of(f"vllm@{fake.url}"), address)
        seen: list[int] = []
        most = 0

        async def client(session: aiohttp.ClientSession, url: str) -> None:
            while True:
                async with session.post(f"{url}/v1/chat/completions", json=CHAT, headers=bearing(key)) as answer:
                    seen.append((await answer.json())["usage"]["total_tokens"])

        for number in range(2):
            async with (
                replica(tmp_path / f"{number}", config) as one,
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
            ):
                clients = [asyncio.create_task(client(session, one.url)) for _ in range(8)]
                await asyncio.sleep(1.0 + 0.137 * number)
                one.kill()
                await asyncio.gather(*clients, return_exceptions=True)
            most += 8
            entries = await keys.store.ledger("0000", "9999")
            assert len(seen) >= 8
            requests = sum(entry.used.requests for entry in entries)
            tokens = sum(entry.used.tokens for entry in entries)
            # Those that were on their way may have been entered and never been heard of.
            assert len(seen) <= requests <= len(seen) + most
            assert sum(seen) <= tokens <= sum(seen) + most * max(seen)
