"""Changes of keys by callers that are not admins: the owner of a key cannot remove what an admin has set."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.administered import AdminClient, administered
from unisono.api.admin.key_schema import KeySettings

# Routes that change the settings of a key.
ROUTES = ("/key/update", "/key/regenerate")


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[AdminClient]:
    async with administered(f"sqlite://{tmp_path}/state.db") as running:
        yield running


@dataclass(frozen=True)
class OwnedKey:
    """Key of the user `bob`, and the client that uses another key of this user."""

    id: str
    owner: AdminClient

    async def refused(self, path: str, **changes: object) -> tuple[int, str | None]:
        """Let the owner change the key, and return the status and the `param` of the error."""
        answer = await self.owner.post(path, key=self.id, **changes)
        return answer.status, answer.body.get("error", {}).get("param")


async def bobs_key(admin: AdminClient, **settings: object) -> OwnedKey:
    """Create a user and a key that an admin has given to the user."""
    own = (await admin.made("/user/new", user_id="bob", user_role="internal_user"))["key"]
    made = await admin.made("/key/generate", user_id="bob", **settings)
    return OwnedKey(made["token"], admin.using(own))


@pytest.mark.parametrize("value", [False, None])
async def test_owner_cannot_remove_the_block_of_an_admin(admin: AdminClient, value: bool | None) -> None:
    key = await bobs_key(admin)
    await admin.made("/key/block", key=key.id)
    for path in ROUTES:
        assert await key.refused(path, blocked=value) == (403, "blocked")
    assert (await admin.get(f"/key/info?key={key.id}")).body["info"]["blocked"] is True


@pytest.mark.parametrize("team", [None, "tz"])
async def test_owner_cannot_escape_the_limits_of_the_user(admin: AdminClient, team: str | None) -> None:
    await admin.made("/team/new", team_id="tz")
    key = await bobs_key(admin, team_id=team)
    assert await key.refused("/key/update", user_id=None) == (403, "user_id")
    assert (await admin.get(f"/key/info?key={key.id}")).body["info"]["user_id"] == "bob"
    # An admin can take the key from its user.
    await admin.made("/key/update", key=key.id, user_id=None)
    assert (await admin.get(f"/key/info?key={key.id}")).body["info"]["user_id"] is None


async def test_owner_cannot_detach_a_key_from_the_budget_of_an_admin(admin: AdminClient) -> None:
    await admin.made("/budget/new", budget_id="tiny", max_budget=0.02)
    key = await bobs_key(admin, budget_id="tiny")
    for path in ROUTES:
        assert await key.refused(path, budget_id=None) == (403, "budget_id")
    assert (await admin.get(f"/key/info?key={key.id}")).body["info"]["budget_id"] == "tiny"


# Settings of an admin, and the changes of the owner: values that loosen the key, and values that do not.
STRICT: dict[str, Any] = {
    "max_budget": 1.0,
    "soft_budget": 0.5,
    "budget_duration": "30d",
    "max_parallel_requests": 4,
    "tpm_limit": 1000,
    "rpm_limit": 60,
    "token_budget": 10_000,
    "duration": "30d",
    "models": ["gpt-oss", "other"],
    "object_permission": {"mcp_servers": ["docs", "search"]},
    "blocked": True,
    "budget_id": "tiny",
    "key_alias": "bobs",
    "metadata": {"cost centre": 42},
    "tags": ["nightly"],
}
CHANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "max_budget": ([None, 1.5], [0, 0.5]),
    "soft_budget": ([None, 0.6], [0, 0.1]),
    "budget_duration": ([None, "none", "1h", "60d"], ["30d"]),
    "max_parallel_requests": ([None, 5], [0, 4]),
    "tpm_limit": ([None, 1001], [0, 1000]),
    "rpm_limit": ([None, 61], [0, 60]),
    "token_budget": ([None, 10_001], [0, 10_000]),
    "duration": ([None, "-1", "60d"], ["1d"]),
    "models": ([None, [], ["*"], ["gpt-oss", "third"]], [["gpt-oss"], ["no-default-models"]]),
    "object_permission": ([{"mcp_servers": None}, {"mcp_servers": ["files"]}, {}], [None, {"mcp_servers": ["docs"]}]),
    "blocked": ([None, False], [True]),
    "budget_id": ([None], ["tiny"]),
    "raw": ([True], [None, False]),
    "user_id": ([None], ["bob"]),
    # The owner may change these settings in any way, because they restrict nothing.
    "key_alias": ([], [None, "mine"]),
    "metadata": ([], [None, {}]),
    "tags": ([], [None, []]),
}


def test_every_setting_has_changes() -> None:
    assert set(CHANGES) == {*KeySettings.model_fields, "user_id"}


@pytest.mark.parametrize("path", ROUTES)
async def test_owner_can_make_a_key_stricter_but_not_looser(admin: AdminClient, path: str) -> None:
    await admin.made("/budget/new", budget_id="tiny", max_budget=1000)
    key = await bobs_key(admin, **STRICT)
    before = (await admin.get(f"/key/info?key={key.id}")).body
    fields = {name: values for name, values in CHANGES.items() if path == "/key/update" or name != "user_id"}
    for field, (looser, _) in fields.items():
        for value in looser:
            assert await key.refused(path, **{field: value}) == (403, field), (field, value)
    assert (await admin.get(f"/key/info?key={key.id}")).body == before
    for field, (_, others) in fields.items():
        for value in others:
            assert (await key.refused(path, **{field: value}))[0] == 200, (field, value)
            # Restore the settings for the next change.
            await admin.made("/key/update", key=key.id, user_id="bob", raw=False, **STRICT)


async def test_owner_cannot_override_the_limits_of_a_named_budget(admin: AdminClient) -> None:
    await admin.made("/budget/new", budget_id="tiny", max_budget=0.02, budget_duration="1d", rpm_limit=5)
    key = await bobs_key(admin, budget_id="tiny")
    for field, value in (("max_budget", 5.0), ("rpm_limit", 6)):
        assert await key.refused("/key/update", **{field: value}) == (403, field)
    assert await key.refused("/key/update", token_budget=10**9, budget_duration="1h") == (403, "budget_duration")
    assert (await key.refused("/key/update", rpm_limit=4))[0] == 200


async def test_admin_of_a_team_may_loosen_the_keys_of_the_team(admin: AdminClient) -> None:
    await admin.made("/team/new", team_id="tz")
    key = await bobs_key(admin, team_id="tz", rpm_limit=5, blocked=True)
    await admin.made("/team/member_add", team_id="tz", member={"user_id": "bob", "role": "admin"})
    assert (await key.refused("/key/update", rpm_limit=None, blocked=False))[0] == 200
    assert await key.refused("/key/update", raw=True) == (403, "raw")


# Permissions of a key without permissions in LiteLLM's clients.
EMPTY_FORM: dict[str, Any] = {
    "mcp_servers": [],
    "mcp_access_groups": [],
    "mcp_tool_permissions": {},
    "vector_stores": [],
    "agents": [],
}


@pytest.mark.parametrize("path", ROUTES)
async def test_empty_form_restricts_no_key_and_loosens_none(admin: AdminClient, path: str) -> None:
    key = await bobs_key(admin)
    assert await permission(admin, key) is None
    assert (await key.refused(path, object_permission=EMPTY_FORM, rpm_limit=5))[0] == 200
    assert await permission(admin, key) is None
    # A list of servers alone, and the removal of all servers of a restricted key, permit no server.
    assert (await key.refused(path, object_permission={"object_permission_id": "id", "mcp_servers": []}))[0] == 200
    assert (await permission(admin, key))["mcp_servers"] == []
    assert (await key.refused(path, object_permission=EMPTY_FORM))[0] == 200
    assert (await permission(admin, key))["mcp_servers"] == []
    await admin.made("/key/update", key=key.id, object_permission={"mcp_servers": ["docs"]})
    await admin.made(path, key=key.id, object_permission=EMPTY_FORM)
    assert (await permission(admin, key))["mcp_servers"] == []


async def permission(admin: AdminClient, key: OwnedKey) -> Any:
    return (await admin.get(f"/key/info?key={key.id}")).body["info"]["object_permission"]


async def test_empty_form_of_a_new_key_restricts_nothing(admin: AdminClient) -> None:
    made = await admin.made("/key/generate", object_permission=EMPTY_FORM)
    assert made["object_permission"] is None
