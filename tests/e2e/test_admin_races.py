"""Concurrent requests to the admin API: none is lost, and none leaves an object without its owner."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.administered import AdminClient, administered
from tests.e2e.gateway import Answer

CLIENTS = 20

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def admin(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AdminClient]:
    async with administered(f"sqlite://{tmp_path_factory.mktemp('races')}/state.db") as running:
        yield running


async def statuses(send: Callable[[int], Awaitable[Answer]]) -> Counter[int]:
    answers = await asyncio.gather(*(send(number) for number in range(CLIENTS)))
    return Counter(answer.status for answer in answers)


async def test_users_join_a_team_at_once(admin: AdminClient) -> None:
    await admin.made("/team/new", team_id="joined")
    made = await statuses(lambda i: admin.post("/user/new", user_id=f"joining-{i}", teams=["joined"]))
    members = (await admin.get("/team/info?team_id=joined")).body["team_info"]["members"]
    assert (made, len(members)) == (Counter({200: CLIENTS}), CLIENTS)


async def test_concurrent_changes_of_an_object_all_succeed(admin: AdminClient) -> None:
    key = (await admin.made("/key/generate"))["token"]
    assert await statuses(lambda i: admin.post("/key/update", key=key, rpm_limit=1 + i)) == Counter({200: CLIENTS})
    await admin.made("/team/new", team_id="changed")
    changes = await statuses(lambda i: admin.post("/team/update", team_id="changed", rpm_limit=1 + i))
    assert changes == Counter({200: CLIENTS})


async def test_an_email_address_gets_one_user(admin: AdminClient) -> None:
    await admin.made("/team/new", team_id="invited")
    member = {"user_email": "new@example.org"}
    added = await statuses(lambda _: admin.post("/team/member_add", team_id="invited", member=member))
    found = (await admin.get("/user/list?user_email=new@example.org")).body["users"]
    assert (added, len(found)) == (Counter({200: CLIENTS}), 1)
    # The address of a user that was renamed or deleted is free again.
    (first,) = found
    await admin.made("/user/update", user_id=first["user_id"], user_email="other@example.org")
    await admin.made("/team/member_add", team_id="invited", member=member)
    (second,) = (await admin.get("/user/list?user_email=new@example.org")).body["users"]
    await admin.made("/user/delete", user_ids=[second["user_id"]])
    await admin.made("/team/member_add", team_id="invited", member=member)
    (third,) = (await admin.get("/user/list?user_email=new@example.org")).body["users"]
    assert len({user["user_id"] for user in (first, second, third)}) == 3


async def test_no_user_is_created_without_its_key(admin: AdminClient) -> None:
    await admin.made("/key/generate", key_alias="taken")
    bodies: list[dict[str, Any]] = [{"key_alias": "taken"}, {"key_alias": "free", "auto_create_key": False}]
    for fields in bodies:
        refused = await admin.post("/user/new", user_id="partial", **fields)
        assert (refused.status, refused.body["error"]["param"]) == (400, "key_alias")
        assert (await admin.get("/user/info?user_id=partial")).status == 404
    made = [await admin.made("/user/new", user_id="whole", key_alias="free") for _ in range(2)]
    assert made[0]["key"] == made[1]["key"]
    once = {"idempotency-key": "whole"}
    again = [await admin.post("/user/new", once, key_alias="free again") for _ in range(2)]
    assert again[0].body["key"] == again[1].body["key"]


@pytest.mark.parametrize("kind", ["team", "user"])
async def test_no_key_outlives_its_owner(admin: AdminClient, kind: str) -> None:
    await admin.made(f"/{kind}/new", **{f"{kind}_id": "brief"})

    async def send(number: int) -> Answer:
        if number == CLIENTS // 2:
            return await admin.post(f"/{kind}/delete", **{f"{kind}_ids": ["brief"]})
        return await admin.post("/key/generate", **{f"{kind}_id": "brief"})

    answers = await asyncio.gather(*(send(number) for number in range(CLIENTS)))
    assert {answer.status for answer in answers} <= {200, 404}
    tokens = [answer.body["token"] for answer in answers if answer.status == 200 and "token" in str(answer.body)]
    found = [(await admin.get(f"/key/info?key={token}")).status for token in tokens]
    assert set(found) <= {404}
