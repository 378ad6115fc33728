"""A gateway with a month of traffic, teams and keys, for the screenshots of the web page.

Runs in the project's own environment, as `python -m tests.web.browser.picture_stage`. The records are written to the
store before the gateway starts, as a gateway would have written them.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.e2e.clients.stage import MASTER_KEY, nobody_at, run, served, until_told
from tests.fakes import FakeVllm
from tests.web.browser.scripts import script_of
from unisono.core.quotas import Account, LedgerLine, TokenUsage, UsageRecord
from unisono.core.request_record import RequestRecord
from unisono.store import open_store

MODELS = ("gpt-oss-120b", "gpt-oss-20b")
TEAMS = {"search": ("nightly", "indexer"), "support": ("chat", "summaries"), "research": ("evals",)}
FAILURES = (("backend_unavailable", 503), ("rate_limit_exceeded", 429), ("backend_timeout", 504))
RULES = ("missing-end", "unknown-channel", "glued-role", "restored-stop")
DAY_S = 86_400
DAYS = 30


def config_of(url: str, closed: str, store: str) -> dict[str, Any]:
    def entry(name: str, base: str, id: str) -> dict[str, Any]:
        price = {"input": 0.1, "output": 0.5} if name == "gpt-oss-120b" else {"input": 0.05, "output": 0.2}
        params = {"model": "vllm/tiny", "api_base": base}
        return {"model_name": name, "litellm_params": params, "model_info": {"id": id}, "unisono": {"price": price}}

    return {
        "model_list": [
            {"model_name": "gpt-oss-demo", "litellm_params": {"model": "mlx/demo"}, "model_info": {"id": "local"}},
            entry("gpt-oss-120b", url, "gpu-1"),
            entry("gpt-oss-120b", closed, "gpu-2"),
            entry("gpt-oss-20b", url, "gpu-3"),
        ],
        "router_settings": {"model_group_alias": {"gpt-4o": "gpt-oss-120b"}},
        "general_settings": {"master_key": MASTER_KEY},
        "store": {"url": store},
        "unisono": {"traces": {"mode": "all"}, "current_date": "2026-01-02", "salt_key": "a salt for screenshots"},
    }


def post(address: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {MASTER_KEY}", "content-type": "application/json"}
    with urlopen(Request(f"{address}{path}", json.dumps(body).encode(), headers)) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def make_keys(address: str) -> list[tuple[str, str, str]]:
    """Create teams and keys, and return the team, id and name of each key."""
    keys = []
    for number, (team, names) in enumerate(TEAMS.items()):
        post(address, "/team/new", {"team_id": team, "team_alias": team.title(), "max_budget": 40.0 * (number + 1)})
        for name in names:
            settings = {"key_alias": name, "team_id": team, "max_budget": 5.0 * (number + 1), "budget_duration": "30d"}
            settings["soft_budget"] = 3.0 * (number + 1)
            made = post(address, "/key/generate", {**settings, "rpm_limit": 600, "models": list(MODELS)[number % 2 :]})
            keys.append((team, made["token"], name))
    return keys


def records_of(keys: list[tuple[str, str, str]], now: float) -> list[RequestRecord]:
    """Return a month of requests, most of them of the last day."""
    chance, records = random.Random(7), []
    for number in range(6_000):
        age = chance.random() * DAY_S if number % 3 else chance.random() * DAYS * DAY_S
        at = now - age
        # More requests by day than by night.
        if chance.random() > 0.45 + 0.45 * math.sin((at % DAY_S) / DAY_S * 2 * math.pi - math.pi / 2):
            continue
        team, key, name = chance.choice(keys)
        model = chance.choice(MODELS)
        first = chance.lognormvariate(-1.3, 0.5)
        output = int(chance.lognormvariate(5.3, 0.8))
        facts: dict[str, Any] = {"id": f"req_{number:032x}", "method": "POST", "route": "/v1/chat/completions"}
        facts |= {"tenant": team, "key": key, "key_name": name, "model": model}
        if chance.random() < 0.015:
            error, status = chance.choice(FAILURES)
            tries = (("gpu-2", error),) if error.startswith("backend") else ()
            records.append(RequestRecord(**facts, at=at, duration_s=first, status=status, error=error, attempts=tries))
            continue
        deployment = "gpu-1" if model == MODELS[0] else "gpu-3"
        tries = (("gpu-2", "backend_unavailable"), (deployment, "")) if chance.random() < 0.05 else ((deployment, ""),)
        records.append(
            RequestRecord(
                **facts,
                at=at,
                duration_s=first + output / 90,
                status=200,
                served_model=model,
                deployment=deployment,
                attempts=tries,
                input_tokens=int(chance.lognormvariate(6.5, 0.9)),
                output_tokens=output,
                reasoning_tokens=output // 3,
                first_token_s=first,
                waited_s=first * chance.random() * 0.2,
                finish=chance.choice(("stop", "stop", "tool_calls")),
                recoveries=(chance.choice(RULES),) if chance.random() < 0.06 else (),
                cost=output // 2 + 90,
            )
        )
    return sorted(records, key=lambda record: record.at)


def usage_of(records: list[RequestRecord]) -> list[UsageRecord]:
    """Return the lines of the ledger for these requests."""
    sums: dict[tuple[str, str, str, str], TokenUsage] = defaultdict(TokenUsage)
    for record in records:
        day = datetime.fromtimestamp(record.at, UTC).date().isoformat()
        used = TokenUsage(
            requests=1,
            errors=int(bool(record.error)),
            input=record.input_tokens,
            output=record.output_tokens,
            reasoning=record.reasoning_tokens,
            cost=record.cost * 40,
        )
        sums[record.tenant, record.key, record.model, day] += used
    return [
        UsageRecord("-".join(names), LedgerLine(Account(names[0], names[1]), names[2], names[3], used))
        for names, used in sums.items()
    ]


async def fill(url: str, keys: list[tuple[str, str, str]]) -> None:
    records = records_of(keys, time.time())
    store = open_store(url)
    await store.start()
    for at in range(0, len(records), 500):
        await store.keep_requests(*records[at : at + 500], for_s=40 * DAY_S, most=100_000)
    await store.settle(*usage_of(records))
    await store.aclose()


async def perform() -> None:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unisono-pictures-")))
        fake = await stack.enter_async_context(FakeVllm(script=script_of))
        closed = stack.enter_context(nobody_at())
        url = f"sqlite:///{folder}/state.db"
        address = await stack.enter_async_context(served(folder, "gateway", config_of(fake.url, closed, url)))
        await fill(url, await asyncio.to_thread(make_keys, address))
        print(json.dumps({"gateway": address, "key": MASTER_KEY}), flush=True)
        await until_told()


if __name__ == "__main__":
    run(perform)
