"""Budgets that are set, or get a different period, after some usage."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.administered import AdminClient, administered
from tests.e2e.gateway import Answer
from unisono.access.keys import FRESH_S

# In USD per million tokens, so that one answer costs about a dollar.
PRICE = {"input": 10_000, "output": 10_000}
BUDGET = {"max_budget": 0.01, "budget_duration": "30d"}


async def chat(admin: AdminClient, key: str, **fields: Any) -> Answer:
    return await admin.gateway.chat_as(key, max_tokens=100, **fields)


async def key_budget(admin: AdminClient, key: str) -> None:
    await admin.made("/key/update", key=key, **BUDGET)


async def team_budget(admin: AdminClient, key: str) -> None:
    await admin.made("/team/update", team_id="search", **BUDGET)


async def user_budget(admin: AdminClient, key: str) -> None:
    await admin.made("/user/update", user_id="ann", **BUDGET)


async def customer_budget(admin: AdminClient, key: str) -> None:
    await admin.made("/customer/update", user_id="shop", **BUDGET)


async def named_budget(admin: AdminClient, key: str) -> None:
    await admin.made("/budget/update", budget_id="small", **BUDGET)


@pytest.mark.parametrize("set_budget", [key_budget, team_budget, user_budget, customer_budget, named_budget])
async def test_earlier_usage_counts_against_a_new_budget(
    set_budget: Callable[[AdminClient, str], Awaitable[None]], tmp_path: Path
) -> None:
    async with administered(f"sqlite://{tmp_path}/state.db", PRICE) as admin:
        await admin.made("/team/new", team_id="search")
        await admin.made("/user/new", user_id="ann")
        await admin.made("/customer/new", user_id="shop")
        await admin.made("/budget/new", budget_id="small", rpm_limit=1000)
        made = await admin.made("/key/generate", team_id="search", user_id="ann", budget_id="small")
        assert (await chat(admin, made["key"], user="shop")).status == 200
        await set_budget(admin, made["key"])
        await asyncio.sleep(FRESH_S)
        refused = await chat(admin, made["key"], user="shop")
    assert (refused.status, refused.body["error"]["code"]) == (429, "insufficient_quota")


@pytest.mark.parametrize(("before", "after"), [("30d", "1mo"), (None, "30d"), ("1d", "30d")])
async def test_a_budget_with_a_new_period_stays_spent(before: str | None, after: str, tmp_path: Path) -> None:
    async with administered(f"sqlite://{tmp_path}/state.db", PRICE) as admin:
        made = await admin.made("/key/generate", max_budget=2, budget_duration=before)
        while (await chat(admin, made["key"])).status == 200:
            pass
        await admin.made("/key/update", key=made["key"], budget_duration=after)
        await asyncio.sleep(FRESH_S)
        assert (await chat(admin, made["key"])).status == 429
        info = (await admin.get(f"/key/info?key={made['token']}")).body["info"]
        assert info["spend"] <= info["max_budget"]
        # After the budget is raised, it has room again.
        await admin.made("/key/update", key=made["key"], max_budget=100)
        await asyncio.sleep(FRESH_S)
        assert (await chat(admin, made["key"])).status == 200
