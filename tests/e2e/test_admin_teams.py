"""Teams, users and budgets over the admin API, and the limits of a key, its user and its team together."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.e2e.administered import AdminClient
from tests.e2e.test_admin_keys import becomes, refused_field, works


async def test_team_is_created_read_changed_and_deleted(admin: AdminClient) -> None:
    settings: dict[str, Any] = {
        "team_alias": "Search",
        "models": ["gpt-oss"],
        "max_budget": 100.0,
        "budget_duration": "1mo",
        "rpm_limit": 600,
        "metadata": {"cost centre": "42"},
    }
    team = await admin.made("/team/new", team_id="search", **settings)
    assert {name: team[name] for name in settings} == settings
    assert await admin.made("/team/new", team_id="search", **settings) == team
    assert refused_field(await admin.post("/team/new", team_id="search")) == (400, "team_id")
    key = await admin.made("/key/generate", team_id="search")
    info = (await admin.get("/team/info?team_id=search")).body
    assert (info["team_info"]["team_alias"], [each["token"] for each in info["keys"]]) == ("Search", [key["token"]])
    assert (await admin.get("/team/list")).body == [team]
    changed = await admin.made("/team/update", team_id="search", rpm_limit=None)
    assert changed["data"]["rpm_limit"] is None
    assert changed["data"]["max_budget"] == 100.0
    assert await admin.made("/team/delete", team_ids=["search"]) == {"deleted_teams": ["search"]}
    assert refused_field(await admin.get("/team/info?team_id=search")) == (404, "team_id")
    await becomes(admin, key["key"], 401)


async def test_a_team_cannot_be_created_in_the_tenant_of_other_requests(admin: AdminClient) -> None:
    key = await admin.made("/key/generate")
    for id in (key["token"], "default", "local"):
        assert refused_field(await admin.post("/team/new", team_id=id)) == (400, "team_id")
        assert refused_field(await admin.post("/key/generate", team_id=id)) == (404, "team_id")
    assert (await admin.get("/team/list")).body == []
    await admin.made("/team/new", team_id="key_team")


async def test_user_is_created_read_changed_and_deleted(admin: AdminClient) -> None:
    await admin.made("/team/new", team_id="search")
    made = await admin.made("/user/new", user_id="ann", user_email="ann@example.org", teams=["search"], rpm_limit=5)
    assert (made["user_role"], made["rpm_limit"], made["teams"]) == ("internal_user", 5, ["search"])
    assert await works(admin, made["key"]) == 200
    assert (await admin.made("/user/new", user_id="ann", user_email="ann@example.org", teams=["search"], rpm_limit=5))[
        "key"
    ] == made["key"]
    assert refused_field(await admin.post("/user/new", user_id="ann")) == (400, "user_id")
    info = (await admin.get("/user/info?user_id=ann")).body
    assert [key["token"] for key in info["keys"]] == [made["token"]]
    assert [team["team_id"] for team in info["teams"]] == ["search"]
    changed = await admin.made("/user/update", user_id="ann", user_alias="Ann")
    assert (changed["data"]["user_alias"], changed["data"]["rpm_limit"]) == ("Ann", 5)
    page = (await admin.get("/user/list?page_size=1")).body
    assert (page["total"], [user["user_id"] for user in page["users"]]) == (1, ["ann"])
    assert await admin.made("/user/delete", user_ids=["ann"]) == 1
    assert refused_field(await admin.get("/user/info?user_id=ann")) == (404, "user_id")
    await becomes(admin, made["key"], 401)
    # Nothing of the user is left in its keys and teams.
    (key,) = (await admin.get("/key/list?status=deleted&return_full_object=true")).body["keys"]
    assert (key["user_id"], key["key_alias"]) == (None, None)
    assert (await admin.get("/team/info?team_id=search")).body["team_info"]["members"] == []


async def test_idempotency_key_creates_one_team_and_one_user(admin: AdminClient) -> None:
    headers = {"idempotency-key": "one"}
    teams = await asyncio.gather(*(admin.post("/team/new", headers, team_alias="A") for _ in range(4)))
    users = await asyncio.gather(*(admin.post("/user/new", headers, user_alias="A") for _ in range(4)))
    assert {answer.status for answer in (*teams, *users)} == {200}
    assert len({answer.body["team_id"] for answer in teams}) == 1
    assert len({(answer.body["user_id"], answer.body["key"]) for answer in users}) == 1
    assert (await admin.post("/team/new", headers, team_alias="B")).status == 409


async def test_members_are_added_and_removed(admin: AdminClient) -> None:
    await admin.made("/team/new", team_id="search", members_with_roles=[{"user_id": "ann", "role": "admin"}])
    team = await admin.made("/team/member_add", team_id="search", member=[{"user_id": "bob", "role": "user"}])
    assert team["members_with_roles"] == [{"user_id": "ann", "role": "admin"}, {"user_id": "bob", "role": "user"}]
    assert [user["user_id"] for user in team["updated_users"]] == ["bob"]
    team = await admin.made("/team/member_delete", team_id="search", user_id="ann")
    assert team["members"] == ["bob"]
    gone = await admin.post("/team/member_delete", team_id="search", user_id="ann")
    assert refused_field(gone) == (404, "user_id")
    assert refused_field(await admin.post("/team/member_add", team_id="none", member={"user_id": "x"})) == (
        404,
        "team_id",
    )


async def test_blocked_team_and_user_stop_their_keys(admin: AdminClient) -> None:
    await admin.made("/team/new", team_id="search")
    key = (await admin.made("/key/generate", team_id="search"))["key"]
    assert await works(admin, key) == 200
    assert (await admin.made("/team/block", team_id="search"))["blocked"] is True
    await becomes(admin, key, 401)
    await admin.made("/team/unblock", team_id="search")
    await becomes(admin, key, 200)


async def test_models_of_team_and_user_restrict_a_key(admin: AdminClient) -> None:
    await admin.made("/team/new", team_id="search", models=["other"])
    key = (await admin.made("/key/generate", team_id="search", models=["gpt-oss"]))["key"]
    refused = await admin.gateway.chat_as(key)
    assert (refused.status, refused.body["error"]["code"]) == (403, "model_not_allowed")
    assert (await admin.using(key).get("/v1/models")).body["data"] == []


OWNERS = ["key", "user", "team"]


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("tightest", OWNERS)
async def test_tightest_of_the_limits_decides_under_concurrency(admin: AdminClient, tightest: str) -> None:
    limits = {owner: 4 if owner == tightest else 30 for owner in OWNERS}
    await admin.made("/team/new", team_id="search", rpm_limit=limits["team"])
    await admin.made("/user/new", user_id="ann", auto_create_key=False, rpm_limit=limits["user"])
    made = await admin.made("/key/generate", team_id="search", user_id="ann", rpm_limit=limits["key"])
    answers = await asyncio.gather(*(admin.gateway.chat_as(made["key"]) for _ in range(12)))
    assert Counter(answer.status for answer in answers) == {200: 4, 429: 8}
    messages = {answer.body["error"]["message"] for answer in answers if answer.status == 429}
    assert messages == {f"This {tightest} has reached its limit of requests per minute; try again later."}
    granted = [answer.headers for answer in answers if answer.status == 200]
    assert {headers["x-ratelimit-limit-requests"] for headers in granted} == {"4"}
    # Refused requests took nothing of the other limits.
    if tightest != "team":
        other = await admin.made("/key/generate", team_id="search")
        headers = (await admin.gateway.chat_as(other["key"])).headers
        assert headers["x-ratelimit-remaining-requests"] == "25"


async def test_budget_of_a_team_applies_to_all_its_keys(admin: AdminClient) -> None:
    await admin.made("/team/new", team_id="search", token_budget=1)
    for _ in range(2):
        key = (await admin.made("/key/generate", team_id="search"))["key"]
        refused = await admin.gateway.chat_as(key)
        assert (refused.status, refused.body["error"]["message"]) == (429, "The token budget of this team is spent.")
    await admin.made("/team/update", team_id="search", token_budget=None)
    await becomes(admin, key, 200)


async def test_named_budget_gives_the_missing_limits(admin: AdminClient) -> None:
    budget = await admin.made("/budget/new", budget_id="small", rpm_limit=1, max_budget=5.0, budget_duration="30d")
    assert (budget["budget_id"], budget["rpm_limit"], budget["max_budget"]) == ("small", 1, 5.0)
    assert await admin.made("/budget/info", budgets=["small"]) == [budget]
    assert refused_field(await admin.post("/budget/info", budgets=["none"])) == (404, "budgets")
    key = (await admin.made("/key/generate", budget_id="small"))["key"]
    assert [await works(admin, key) for _ in range(2)] == [200, 429]
    own = (await admin.made("/key/generate", budget_id="small", rpm_limit=2))["key"]
    assert [await works(admin, own) for _ in range(3)] == [200, 200, 429]
    assert refused_field(await admin.post("/budget/delete", id="small")) == (400, "id")
    await admin.made("/budget/update", budget_id="small", rpm_limit=50)
    await becomes(admin, key, 200)


async def test_changes_of_teams_users_and_budgets_are_audited(admin: AdminClient) -> None:
    await admin.made("/team/new", team_id="search")
    await admin.made("/team/member_add", team_id="search", member={"user_id": "ann"})
    await admin.made("/team/block", team_id="search")
    await admin.made("/budget/new", budget_id="small")
    await admin.made("/user/delete", user_ids=["ann"])
    logs = (await admin.get("/audit")).body["audit_logs"]
    assert [(log["action"], log["table_name"], log["object_id"]) for log in reversed(logs)] == [
        ("created", "team", "search"),
        ("created", "user", "ann"),
        ("members_changed", "team", "search"),
        ("blocked", "team", "search"),
        ("created", "budget", "small"),
        ("members_changed", "team", "search"),
        ("deleted", "user", "ann"),
    ]
