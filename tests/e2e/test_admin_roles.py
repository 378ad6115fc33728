"""Every admin route with every role: denied by default, and a foreign object equals a missing one."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.administered import AdminClient, administered
from tests.e2e.gateway import Answer, to_answer
from tests.e2e.keyed import places_of
from tests.e2e.test_route_matrix import OPEN_PATHS
from tests.e2e.test_route_matrix import ROUTES as ALL_ROUTES
from unisono.api.admin.roles import PERMISSIONS, Role
from unisono.api.admin.routes import ADMIN

ROUTES = sorted({(place.method, place.path) for place in places_of(ADMIN.routes) if place.method != "HEAD"})
# Fields that name an object, by route. The others name none.
TARGETS: dict[str, tuple[str, ...]] = {
    "/key/info": ("key",),
    "/key/update": ("key",),
    "/key/delete": ("keys",),
    "/key/block": ("key",),
    "/key/unblock": ("key",),
    "/key/regenerate": ("key",),
    "/key/generate": ("team_id", "user_id", "budget_id"),
    "/team/info": ("team_id",),
    "/team/update": ("team_id",),
    "/team/delete": ("team_ids",),
    "/team/block": ("team_id",),
    "/team/unblock": ("team_id",),
    "/team/member_add": ("team_id",),
    "/team/member_delete": ("team_id",),
    "/user/info": ("user_id",),
    "/user/update": ("user_id",),
    "/user/delete": ("user_ids",),
    "/key/{key}/regenerate": ("key",),
    "/budget/info": ("budgets",),
    "/budget/delete": ("id",),
    "/budget/update": ("budget_id",),
}
EXTRA: dict[str, dict[str, Any]] = {
    "/team/member_add": {"member": {"user_id": "new"}},
    "/team/member_delete": {"user_id": "ann"},
}
LISTS = frozenset({"keys", "team_ids", "user_ids", "budgets"})
ROLES = [role for role in Role if role is not Role.MASTER]


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[AdminClient]:
    async with administered(f"sqlite://{tmp_path}/state.db") as running:
        yield running


async def clients(admin: AdminClient) -> dict[Role, AdminClient]:
    """Return a client of every role. Team admin and user belong to the team `own`."""
    await admin.made("/team/new", team_id="own")
    await admin.made("/team/new", team_id="foreign", members_with_roles=[{"user_id": "ann"}])
    await admin.made("/budget/new", budget_id="foreign")
    found: dict[Role, AdminClient] = {Role.MASTER: admin}
    for role, name in (
        (Role.ADMIN, "proxy_admin"),
        (Role.VIEWER, "proxy_admin_viewer"),
        (Role.TEAM_ADMIN, "internal_user"),
        (Role.USER, "internal_user"),
        (Role.USER_VIEWER, "internal_user_viewer"),
    ):
        key = (await admin.made("/user/new", user_id=role.value, user_role=name))["key"]
        found[role] = admin.using(key)
    await admin.made("/team/member_add", team_id="own", member={"user_id": Role.TEAM_ADMIN.value, "role": "admin"})
    await admin.made("/team/member_add", team_id="own", member={"user_id": Role.USER.value})
    found[Role.KEY] = admin.using((await admin.made("/key/generate"))["key"])
    return found


async def send(client: AdminClient, method: str, path: str, fields: dict[str, Any]) -> Answer:
    path = path.replace("{key}", str(fields.get("key", "key_none")))
    if method == "GET":
        query = "&".join(f"{name}={value}" for name, value in fields.items())
        return await client.get(f"{path}?{query}")
    url = client.gateway.url + path.replace("{id:path}", "none")
    headers = {"authorization": f"Bearer {client.key}", "content-type": "application/json"}
    async with client.gateway.session.request(method, url, data=json.dumps(fields), headers=headers) as response:
        return to_answer(response.status, response.headers, await response.read())


# Routes that any valid key may use. Objects belong to the tenant of the key: tests/e2e/test_route_matrix.py compares
# foreign with missing ones. A new route must be added here or to the permissions of roles.
ANY_KEY = frozenset(
    (
        *("/audio/speech", "/audio/transcriptions", "/audio/translations", "/chat/completions", "/completions"),
        *("/detokenize", "/embeddings", "/images/generations", "/inspect", "/messages", "/messages/count_tokens"),
        *("/metrics", "/model/info", "/model_group/info", "/models", "/models/{model:path}", "/moderations"),
        *("/openapi.json", "/rerank", "/score", "/status", "/tokenize", "/usage", "/utils/token_counter"),
        *("/v2/rerank", "/version", "/responses", "/responses/compact", "/responses/input_tokens"),
    )
)
OWN_OBJECTS = frozenset(
    (
        *("/conversations", "/conversations/{conversation}", "/conversations/{conversation}/items"),
        *("/conversations/{conversation}/items/{item}", "/requests", "/requests/stats", "/requests/{id}"),
        "/requests/{id}/tokens",
        *("/responses/{response_id}", "/responses/{response_id}/cancel", "/responses/{response_id}/input_items"),
        *("/traces", "/traces/{id}", "/traces/{id}/fork"),
    )
)
PUBLIC = OPEN_PATHS | {"/page/{name:path}"}


def plain_path(path: str) -> str:
    """Return the path without the prefixes under which a route exists too."""
    return path.removeprefix("/open-responses").removeprefix("/v1")


def test_every_route_of_the_gateway_is_classified() -> None:
    closed = {plain_path(place.path) for place in ALL_ROUTES if place.path not in PUBLIC}
    assert closed - set(PERMISSIONS) == ANY_KEY | OWN_OBJECTS
    assert not (ANY_KEY | OWN_OBJECTS) & set(PERMISSIONS)


@pytest.mark.slow
async def test_every_role_may_use_the_routes_for_any_key(admin: AdminClient) -> None:
    everyone = await clients(admin)
    places = [place for place in ALL_ROUTES if place.path in ANY_KEY | OWN_OBJECTS and place.method in ("GET", "POST")]
    for place in places:
        path = place.at(**dict.fromkeys(place.parameters, "none"))
        answers = {}
        for role, client in everyone.items():
            data = b'{"model": "none"}' if place.method == "POST" else None
            headers = {"authorization": f"Bearer {client.key}", "content-type": "application/json"}
            url = client.gateway.url + path
            async with client.gateway.session.request(place.method, url, data=data, headers=headers) as answer:
                answers[role] = answer.status
        if path != "/completions":  # needs a permission of the key
            assert not {401, 403} & set(answers.values()), (place, answers)


async def test_records_of_foreign_requests_equal_missing_ones(admin: AdminClient) -> None:
    everyone = await clients(admin)
    objects = await foreign_objects(admin)
    client = admin.using((await admin.made("/key/regenerate", key=objects["key"]))["key"])
    id = (await client.gateway.chat_as(client.key)).headers["x-request-id"]
    while (await admin.get(f"/v1/requests/{id}")).status != 200:
        await asyncio.sleep(0.05)
    for role, each in everyone.items():
        found, missing = await each.get(f"/v1/requests/{id}"), await each.get("/v1/requests/req_none")
        listed = (await each.get(f"/v1/requests?key={objects['key']}")).body["data"]
        by_team = (await each.get("/v1/requests?team=foreign")).body["data"]
        logs = (await each.get(f"/spend/logs?request_id={id}")).body
        if role in (Role.MASTER, Role.ADMIN, Role.VIEWER):
            assert (found.status, len(listed), len(by_team), len(logs)) == (200, 1, 1, 1), role
        else:
            assert (found.status, found.raw, listed, by_team, logs) == (404, missing.raw, [], [], []), role


def test_every_route_is_in_the_table_of_permissions() -> None:
    assert {path for _, path in ROUTES} == set(PERMISSIONS)
    # The master key and admins may use every route.
    assert all({Role.MASTER, Role.ADMIN} <= roles for roles in PERMISSIONS.values())


async def test_a_role_without_permission_is_refused_whatever_it_sends(admin: AdminClient) -> None:
    everyone = await clients(admin)
    for method, path in ROUTES:
        for role in set(Role) - PERMISSIONS[path]:
            bodies = set()
            for fields in ({}, {"team_id": "own", "key": "key_none", "colour": "red"}):
                answer = await send(everyone[role], method, path, fields)
                assert answer.status == 403, (role, path, answer.raw)
                bodies.add(answer.raw)
            assert len(bodies) == 1, (role, path)


async def test_a_permitted_role_reaches_the_route(admin: AdminClient) -> None:
    everyone = await clients(admin)
    for method, path in ROUTES:
        for role in PERMISSIONS[path]:
            # An unknown field is noticed after the role was checked; a query ignores it.
            answer = await send(everyone[role], method, path, {"colour": "red"})
            # An object in the path is looked up even if there is no body.
            expected = (200, 400, 404) if method == "GET" else (400, 404) if "{" in path else (400,)
            assert answer.status in expected, (role, path, answer.raw)


async def foreign_objects(admin: AdminClient) -> dict[str, str]:
    """Return an object of each kind that belongs to nobody but the operator."""
    key = await admin.made("/key/generate", team_id="foreign", user_id="ann")
    return {"key": key["token"], "team": "foreign", "user": "ann", "budget": "foreign"}


@pytest.mark.parametrize("role", [Role.TEAM_ADMIN, Role.USER, Role.USER_VIEWER, Role.KEY])
async def test_a_foreign_object_equals_a_missing_one(admin: AdminClient, role: Role) -> None:
    client = (await clients(admin))[role]
    objects = await foreign_objects(admin)
    before = (await admin.get("/audit")).body["total"]
    for method, path in ROUTES:
        if role not in PERMISSIONS[path]:
            continue
        for field in TARGETS.get(path, ()):
            kind = re.sub(r"_ids?$|s$", "", field)
            answers = []
            for id in (objects[kind], "x" * len(objects[kind])):
                value = [id] if field in LISTS else id
                answer = await send(client, method, path, {**EXTRA.get(path, {}), field: value})
                assert answer.status == 404, (path, field, answer.raw)
                answers.append(answer.raw.replace(id.encode(), b"ID"))
            assert answers[0] == answers[1], (path, field)
    assert (await admin.get("/audit")).body["total"] == before


async def test_a_team_admin_gains_no_power_outside_of_its_team(admin: AdminClient) -> None:
    await clients(admin)
    lead = admin.using((await admin.made("/key/generate", team_id="own", user_id=Role.TEAM_ADMIN.value))["key"])
    foreign = await foreign_objects(admin)
    before = (await admin.get("/user/info?user_id=admin")).body["user_info"]
    for user in (Role.ADMIN.value, Role.VIEWER.value, "ann"):
        added = await lead.made("/team/member_add", team_id="own", member={"user_id": user})
        assert added["updated_users"] == [{"user_id": user}]
        created = await lead.made("/key/generate", team_id="own", user_id=user)
        rotated = await lead.made("/key/regenerate", key=created["token"])
        stolen = admin.using(rotated["key"])
        for path, fields in {"/user/new": {"user_id": "x"}, "/team/new": {}, "/budget/new": {}}.items():
            assert (await stolen.post(path, **fields)).status == 403, (user, path)
        assert (await stolen.get("/audit")).status == 403
        assert (await stolen.get(f"/key/info?key={foreign['key']}")).status == 404
        # The key can neither be used on other keys of its user, nor get one without a team.
        assert (await stolen.post("/key/regenerate", key=foreign["key"])).status in (403, 404)
        assert (await stolen.post("/key/generate", team_id="foreign")).status in (403, 404)
        assert (await stolen.post("/key/generate")).status == 403
        assert (await stolen.post("/user/update", user_id=user, user_email="x@example.org")).status in (403, 404)
        info = (await stolen.get("/user/info")).body
        assert [key["token"] for key in info["keys"]] == [created["token"]]
        assert [team["team_id"] for team in info["teams"]] == ["own"]
    assert (await admin.get("/user/info?user_id=admin")).body["user_info"] == before


# For each role of a user: whether its keys may select a deployment, and whether they may read the whole status.
RIGHTS: dict[str, tuple[bool, bool]] = {
    "proxy_admin": (True, True),
    "proxy_admin_viewer": (False, True),
    "internal_user": (False, False),
}


@pytest.mark.parametrize(("role", "rights"), RIGHTS.items(), ids=RIGHTS)
async def test_admins_operate_the_gateway_with_their_own_keys(
    store_address: str, role: str, rights: tuple[bool, bool]
) -> None:
    chat = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
    async with administered(store_address, unisono={"metrics_per_key": True}) as admin:

        async def may(key: str) -> tuple[bool, bool]:
            user = admin.using(key)
            answer = await user.post("/v1/chat/completions", {"x_unisono_deployment": "vllm-1"}, **chat)
            assert answer.status in {200, 403}, answer.raw
            headers = {"authorization": f"Bearer {key}"}
            async with user.gateway.session.get(f"{user.gateway.url}/metrics", headers=headers) as metrics:
                is_readable = metrics.status == 200
            assert ("minutes" in (await user.get("/v1/status")).body) == is_readable
            return answer.status == 200, is_readable

        created = await admin.made("/user/new", user_id="ann", user_role=role)
        assert await may(created["key"]) == rights
        # A key of a team never has these roles.
        await admin.made("/team/new", team_id="red", members_with_roles=[{"user_id": "ann", "role": "admin"}])
        of_team = await admin.made("/key/generate", team_id="red", user_id="ann")
        assert await may(of_team["key"]) == (False, False)


@pytest.mark.parametrize(("role", "models"), [("proxy_admin", 1), ("proxy_admin_viewer", 1), ("internal_user", 0)])
async def test_the_status_for_an_admin_contains_models_that_the_admin_may_not_use(
    admin: AdminClient, role: str, models: int
) -> None:
    created = await admin.made("/user/new", user_id="ann", user_role=role, models=["another"])
    status = (await admin.using(created["key"]).get("/v1/status")).body
    assert len(status["models"]) == models


async def test_a_user_sees_only_itself_in_lists(admin: AdminClient) -> None:
    everyone = await clients(admin)
    await foreign_objects(admin)
    for role in (Role.TEAM_ADMIN, Role.USER, Role.USER_VIEWER):
        keys = (await everyone[role].get("/key/list?return_full_object=true")).body["keys"]
        assert {key["user_id"] for key in keys} == {role.value}
        teams = (await everyone[role].get("/team/list")).body
        assert [team["team_id"] for team in teams] == (["own"] if role is not Role.USER_VIEWER else [])
        assert (await everyone[role].get("/user/info")).body["user_id"] == role.value


async def test_a_team_admin_runs_its_team(admin: AdminClient) -> None:
    everyone = await clients(admin)
    lead = everyone[Role.TEAM_ADMIN]
    key = await lead.made("/key/generate", team_id="own", user_id=Role.USER.value, rpm_limit=5)
    assert (key["team_id"], key["user_id"]) == ("own", "user")
    await lead.made("/key/update", key=key["token"], rpm_limit=6)
    await lead.made("/key/block", key=key["token"])
    await lead.made("/team/member_add", team_id="own", member={"user_id": "new"})
    await lead.made("/team/update", team_id="own", team_alias="Ours")
    await lead.made("/key/delete", keys=[key["token"]])
    for field, value in (("max_budget", 1e6), ("rpm_limit", None), ("models", []), ("blocked", False)):
        refused = await lead.post("/team/update", team_id="own", **{field: value})
        assert (refused.status, refused.body["error"]["param"]) == (403, field)
    changed_by = {log["changed_by"] for log in (await admin.get("/audit?page_size=7")).body["audit_logs"]}
    assert changed_by == {(await lead.get("/key/info")).body["key"]}


async def test_a_user_manages_its_own_keys_within_its_limits(admin: AdminClient) -> None:
    client = (await clients(admin))[Role.USER]
    key = await client.made("/key/generate", key_alias="laptop")
    assert (key["user_id"], key["team_id"]) == ("user", None)
    await client.made("/key/update", key=key["token"], models=["gpt-oss"])
    refused = await client.post("/key/generate", raw=True)
    assert (refused.status, refused.body["error"]["param"]) == (403, "raw")
    for field, value in (("user_role", "proxy_admin"), ("max_budget", 5.0), ("blocked", False)):
        refused = await client.post("/user/update", user_id="user", **{field: value})
        assert (refused.status, refused.body["error"]["param"]) == (403, field)
    await client.made("/user/update", user_id="user", user_alias="Me")
    # An admin's block stays.
    await admin.made("/key/block", key=key["token"])
    refused = await client.post("/key/update", key=key["token"], blocked=False)
    assert (refused.status, refused.body["error"]["param"]) == (403, "blocked")
    await client.made("/key/delete", keys=[key["token"]])


@pytest.mark.parametrize("team", [None, "foreign"])
async def test_a_team_admin_cannot_unblock_its_own_keys_outside_of_its_team(
    admin: AdminClient, team: str | None
) -> None:
    lead = (await clients(admin))[Role.TEAM_ADMIN]
    await admin.made("/team/member_add", team_id="foreign", member={"user_id": Role.TEAM_ADMIN.value})
    key = (await admin.made("/key/generate", user_id=Role.TEAM_ADMIN.value, team_id=team))["token"]
    await admin.made("/key/block", key=key)
    for path, fields in (
        ("/key/unblock", {}),
        ("/key/update", {"blocked": False}),
        ("/key/regenerate", {"blocked": False}),
        (f"/key/{key}/regenerate", {"blocked": False}),
    ):
        refused = await lead.post(path, key=key, **fields)
        assert (path, refused.status, refused.body["error"]["param"]) == (path, 403, "blocked")
        assert (await admin.get(f"/key/info?key={key}")).body["info"]["blocked"] is True
    # The team admin may unblock the keys of their own team.
    key = (await admin.made("/key/generate", team_id="own"))["token"]
    await admin.made("/key/block", key=key)
    assert (await lead.made("/key/unblock", key=key))["blocked"] is False


async def test_a_former_member_loses_the_permissions(admin: AdminClient) -> None:
    lead = (await clients(admin))[Role.TEAM_ADMIN]
    key = await lead.made("/key/generate", team_id="own")
    await admin.made("/team/member_delete", team_id="own", user_id=Role.TEAM_ADMIN.value)
    assert (await lead.get(f"/key/info?key={key['token']}")).status == 404
    assert (await lead.post("/key/block", key=key["token"])).status == 403
