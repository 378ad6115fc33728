"""Teams, users and end users that are created with the id of a deleted one: they start without its spend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.e2e.administered import AdminClient, administered
from unisono.access.end_users import FRESH_S

# USD per million tokens. Each budget permits one to three answers.
PRICE = {"input": 1000.0, "output": 2000.0}
BUDGETS = ({"max_budget": 0.2}, {"token_budget": 200}, {"max_budget": 0.2, "budget_duration": "30d"})


@pytest.fixture
async def admin(store_address: str) -> AsyncIterator[AdminClient]:
    async with administered(store_address, price=PRICE) as running:
        yield running


async def spent(admin: AdminClient, kind: str, budget: dict[str, object]) -> float:
    """Create a team, user or end user, and spend its budget. Return its spend right after its creation."""
    id = f"{kind}_id" if kind == "team" else "user_id"
    made = await admin.made(f"/{kind}/new", **{id: "again"}, **budget)
    key = made.get("key") or (await admin.made("/key/generate", **({id: "again"} if kind == "team" else {})))["key"]
    query = {"team": "team_id", "user": "user_id", "customer": "end_user_id"}[kind]
    info = (await admin.get(f"/{kind}/info?{query}=again")).body
    end_user = {"user": "again"} if kind == "customer" else {}
    statuses = [(await admin.gateway.chat_as(key, **end_user)).status for _ in range(4)]
    assert (statuses[0], statuses[-1]) == (200, 429)
    return float(info.get(f"{kind}_info", info)["spend"])


@pytest.mark.parametrize("kind", ["team", "user", "customer"])
async def test_a_new_owner_has_the_whole_budget(admin: AdminClient, kind: str) -> None:
    for budget in BUDGETS:
        assert await spent(admin, kind, budget) == 0
        ids = {"team": "team_ids"}.get(kind, "user_ids")
        await admin.made(f"/{kind}/delete", **{ids: ["again"]})
        if kind == "customer":
            # Each process caches end users for `FRESH_S` seconds.
            await asyncio.sleep(FRESH_S)
