"""Keys, teams and users of earlier versions, which stored what is refused now: clients can still change them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.e2e.administered import AdminClient
from tests.e2e.keyed import Ring, ring
from unisono.core.directory import DirectoryEntry, EntryKind
from unisono.core.quotas import SHARED_TENANT

OLD = {"guardrails": ["pii"], "cost centre": 42}


@pytest.fixture
async def keys(store_address: str) -> AsyncIterator[Ring]:
    async with ring(store_address) as opened:
        yield opened


async def test_stored_metadata_can_be_sent_back(admin: AdminClient, keys: Ring) -> None:
    record, _ = await keys.issue(metadata=OLD)
    for kind in (EntryKind.TEAM, EntryKind.USER, EntryKind.CUSTOMER):
        await keys.store.put_entry(DirectoryEntry(kind, "old", 1.0, metadata=OLD))
    objects: dict[str, dict[str, Any]] = {
        "/key/update": {"key": record.id},
        "/key/regenerate": {"key": record.id},
        "/team/update": {"team_id": "old"},
        "/user/update": {"user_id": "old"},
        "/customer/update": {"user_id": "old"},
    }
    for path, named in objects.items():
        changed = await admin.made(path, **named, metadata=OLD | {"new": 1}, rpm_limit=5)
        changed = changed.get("data", changed)
        assert (changed["metadata"], changed["rpm_limit"]) == (OLD | {"new": 1}, 5), path
        for metadata in ({"guardrails": ["other"]}, OLD | {"policies": ["strict"]}):
            refused = await admin.post(path, **named, metadata=metadata)
            field = f"metadata.{'policies' if 'policies' in metadata else 'guardrails'}"
            assert (refused.status, refused.body["error"]["param"]) == (400, field), path
    # Metadata without the setting removes it.
    changed = await admin.made("/key/update", key=record.id, metadata={"guardrails": [], "cost centre": 42})
    assert changed["metadata"] == {"cost centre": 42}


async def test_reserved_address_of_a_deleted_user_is_free(admin: AdminClient, keys: Ring) -> None:
    for email in ("one@example.org", "two@example.org"):
        await keys.store.claim(SHARED_TENANT, f"admin:email {email}", "", "deleted")
    await admin.made("/user/new", user_id="one", user_email="one@example.org")
    await admin.made("/team/new", team_id="t")
    team = await admin.made("/team/member_add", team_id="t", member={"user_email": "two@example.org"})
    assert "deleted" not in team["members"]
    assert (await admin.get("/user/info?user_id=deleted")).status == 404


async def test_user_with_a_shared_address_can_be_created_again(admin: AdminClient, keys: Ring) -> None:
    for id in ("ann", "bob"):
        entry = DirectoryEntry(EntryKind.USER, id, 1.0, email="shared@example.org", role="internal_user")
        await keys.store.put_entry(entry)
    for id in ("ann", "bob"):
        again = await admin.made("/user/new", user_id=id, user_email="shared@example.org", user_role="internal_user")
        assert again["user_id"] == id
    refused = await admin.post("/user/new", user_id="new", user_email="shared@example.org")
    assert (refused.status, refused.body["error"]["code"]) == (409, "already_exists")
