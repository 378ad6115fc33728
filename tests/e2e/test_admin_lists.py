"""Filters and pages of the lists of the admin API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.administered import AdminClient, administered

TEAMS = 30

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def admin() -> AsyncIterator[AdminClient]:
    async with administered("memory://") as running:
        for number in range(TEAMS):
            await running.made("/team/new", team_id=f"team-{number}")
        for name in ("ann", "bob"):
            await running.made("/user/new", user_id=name, user_email=f"{name}@example.org", auto_create_key=False)
        await running.made("/team/member_add", team_id="team-1", member={"user_id": "ann", "role": "user"})
        for alias in ("second", "first"):
            await running.made("/key/generate", key_alias=alias)
        yield running


UNKNOWN = {
    "/key/list": "organization_id=o",
    "/key/info": "hash=h",
    "/team/list": "organisation_id=o",
    "/user/list": "sort_by=spend",
    "/customer/list": "alias=x",
    "/global/spend/report": "customer_id=c",
    "/user/daily/activity": "timezone=60",
    "/health": "model_name=m",
    "/audit": "actor=a",
    "/v1/requests": "stauts=500",
    "/v1/requests/stats": "status=500",
    "/v1/usage": "model=m",
    "/v1/model/info": "healthy_only=true",
    "/model_group/info": "models=m",
}


@pytest.mark.parametrize(("path", "query"), UNKNOWN.items())
async def test_unknown_parameter_is_named(admin: AdminClient, path: str, query: str) -> None:
    answer = await admin.get(f"{path}?{query}")
    assert (answer.status, answer.body["error"]["param"]) == (400, query.partition("=")[0])


REFUSED = {
    "/key/list?team_id=a&team_id=b": "team_id",
    "/key/list?page=99999999999999999999": "page",
    "/spend/logs?start_date=2026-11-30&end_date=2026-11-01": "end_date",
    "/spend/logs?summarize=false&start_date=2026-11-30&end_date=2026-11-01": "end_date",
    "/spend/logs?summarize=false&page=201&page_size=50": "page",
}


@pytest.mark.parametrize(("path", "field"), REFUSED.items())
async def test_query_that_would_select_something_else_is_refused(admin: AdminClient, path: str, field: str) -> None:
    answer = await admin.get(path)
    assert (answer.status, answer.body["error"]["param"]) == (400, field)


@pytest.mark.parametrize("day", ["0001-01-01", "9999-12-31"])
async def test_the_first_and_the_last_day_are_possible(admin: AdminClient, day: str) -> None:
    for path in ("/spend/logs?summarize=false&", "/spend/logs?", "/global/spend/report?", "/user/daily/activity?"):
        assert (await admin.get(f"{path}start_date={day}&end_date={day}")).status == 200


async def test_counts_of_a_foreign_team_are_empty(admin: AdminClient) -> None:
    key = await admin.made("/key/generate")
    own = admin.using(key["key"])
    assert (await own.gateway.chat_as(own.key)).status == 200
    while not (counts := (await own.get("/v1/requests/stats")).body["data"]):
        await asyncio.sleep(0.05)
    assert counts[0]["requests"] > 0
    assert (await own.get("/v1/requests/stats?team=team-1")).body["data"] == []
    # The other tests list all keys.
    await admin.made("/key/delete", keys=[key["token"]])


async def test_unknown_parameter_that_requests_nothing_is_accepted(admin: AdminClient) -> None:
    assert (await admin.get("/key/list?organization_id=&expand=false")).status == 200


async def test_list_without_a_page_size_is_whole(admin: AdminClient) -> None:
    assert len((await admin.get("/team/list")).body) == TEAMS
    assert len((await admin.get("/team/list?page=2&page_size=20")).body) == TEAMS - 20
    assert len((await admin.get("/v2/team/list")).body["teams"]) < TEAMS


USERS = {
    "search=NN": ["ann"],
    "user_email=bob@": ["bob"],
    "user_ids=bob,eve": ["bob"],
    "team=team-1": ["ann"],
    "role=internal_user": ["ann", "bob"],
    "search=eve": [],
}


@pytest.mark.parametrize(("query", "expected"), USERS.items())
async def test_users_are_filtered(admin: AdminClient, query: str, expected: list[str]) -> None:
    users = (await admin.get(f"/user/list?{query}")).body["users"]
    assert [user["user_id"] for user in users] == expected


async def test_users_of_an_unknown_team_are_an_error(admin: AdminClient) -> None:
    answer = await admin.get("/user/list?team=none")
    assert (answer.status, answer.body["error"]["param"]) == (404, "team")


async def test_keys_are_searched_and_sorted(admin: AdminClient) -> None:
    async def aliases(query: str) -> list[str]:
        found = await admin.get(f"/key/list?return_full_object=true&{query}")
        return [key["key_alias"] for key in found.body["keys"]]

    assert await aliases("search=SEC") == ["second"]
    assert await aliases("sort_by=key_alias&sort_order=asc") == ["first", "second"]
    assert await aliases("sort_order=asc") == ["second", "first"]


async def test_health_is_that_of_the_named_model(admin: AdminClient) -> None:
    assert (await admin.get("/health?model=gpt-oss")).body["healthy_count"] == 1
    assert (await admin.get("/health?model=other")).body["healthy_count"] == 0
