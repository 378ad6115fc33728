"""Changes of keys by callers that are not admins: the owner of a key cannot remove what an admin has set."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.administered import AdminClient, administered

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
        """Return the status and the field of the error of a change by the owner."""
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
    # An admin can do it.
    await admin.made("/key/update", key=key.id, user_id=None)
    assert (await admin.get(f"/key/info?key={key.id}")).body["info"]["user_id"] is None


async def test_owner_cannot_detach_a_key_from_the_budget_of_an_admin(admin: AdminClient) -> None:
    await admin.made("/budget/new", budget_id="tiny", max_budget=0.02)
    key = await bobs_key(admin, budget_id="tiny")
    for path in ROUTES:
        assert await key.refused(path, budget_id=None) == (403, "budget_id")
    assert (await admin.get(f"/key/info?key={key.id}")).body["info"]["budget_id"] == "tiny"
