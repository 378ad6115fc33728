"""Email addresses of users, each of which belongs to one user."""

from __future__ import annotations

from tests.e2e.administered import AdminClient
from tests.e2e.gateway import Answer


def refusal(answer: Answer) -> tuple[int, str, str | None]:
    assert answer.status != 200, answer.raw
    return answer.status, answer.body["error"]["code"], answer.body["error"]["param"]


TAKEN = (409, "already_exists", "user_email")


async def test_an_address_has_one_user(admin: AdminClient) -> None:
    await admin.made("/user/new", user_id="boss", user_email="boss@example.org")
    bob = admin.using((await admin.made("/user/new", user_id="bob", user_role="internal_user"))["key"])
    for email in ("boss@example.org", "Boss@Example.org"):
        assert refusal(await admin.post("/user/new", user_id="second", user_email=email)) == TAKEN
        assert refusal(await admin.post("/user/new", user_email=email)) == TAKEN
        assert refusal(await bob.post("/user/update", user_id="bob", user_email=email)) == TAKEN
        # A new user that a team names cannot get the address either.
        members = [{"user_id": "third", "user_email": email}]
        assert refusal(await admin.post("/team/new", team_id="t0", members_with_roles=members)) == TAKEN
    # The owner of the address may write it differently, and creation may be repeated.
    await admin.made("/user/update", user_id="boss", user_email="Boss@example.org")
    await admin.made("/user/new", user_id="boss", user_email="Boss@example.org")
    # A team finds the user in any spelling.
    members = [{"user_email": "BOSS@example.org", "role": "admin"}]
    team = await admin.made("/team/new", team_id="t1", members_with_roles=members)
    assert [member["user_id"] for member in team["members_with_roles"]] == ["boss"]


async def test_an_address_that_is_no_longer_used_is_free(admin: AdminClient) -> None:
    await admin.made("/user/new", user_id="ann", user_email="ann@example.org")
    await admin.made("/user/update", user_id="ann", user_email=None)
    await admin.made("/user/new", user_id="second", user_email="ann@example.org")
    await admin.made("/user/delete", user_ids=["second"])
    await admin.made("/user/update", user_id="ann", user_email="ann@example.org")
    # A refused creation does not use up its address.
    refused = await admin.post("/user/new", user_id="ann", user_email="other@example.org")
    assert refusal(refused) == (400, "invalid_value", "user_id")
    await admin.made("/user/new", user_id="other", user_email="other@example.org")
