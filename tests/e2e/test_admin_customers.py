"""End users over the admin API: their limits, models and blocks apply to every request that names them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from websockets.asyncio.client import connect

from tests.e2e.administered import AdminClient
from tests.e2e.gateway import Answer
from tests.e2e.test_admin_keys import refused_field
from unisono.core.quotas import owner_of

# Bodies of requests that name an end user, by path.
REQUESTS: dict[str, Any] = {
    "/v1/chat/completions": lambda user: {"user": user, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": lambda user: {"safety_identifier": user, "input": "Hi"},
    "/v1/messages": lambda user: {
        "metadata": {"user_id": user},
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "Hi"}],
    },
}
FIELDS = {"/v1/chat/completions": "user", "/v1/responses": "safety_identifier", "/v1/messages": "metadata.user_id"}


async def ask(admin: AdminClient, user: str, path: str = "/v1/chat/completions") -> Answer:
    return await admin.post(path, model="gpt-oss", **REQUESTS[path](user))


async def becomes(admin: AdminClient, user: str, status: int) -> None:
    """Wait until requests of the end user get this status: a process caches end users."""
    while (await ask(admin, user)).status != status:
        await asyncio.sleep(0.05)


async def test_end_user_is_created_read_changed_and_deleted(admin: AdminClient) -> None:
    settings: dict[str, Any] = {"alias": "Ann", "max_budget": 5.0, "budget_duration": "30d", "models": ["gpt-oss"]}
    made = await admin.made("/customer/new", user_id="ann", **settings)
    assert {name: made[name] for name in settings} == settings
    assert (made["spend"], made["blocked"], made["litellm_budget_table"]["max_budget"]) == (0, False, 5.0)
    assert await admin.made("/end_user/new", user_id="ann", **settings) == made
    assert refused_field(await admin.post("/customer/new", user_id="ann")) == (400, "user_id")
    assert (await admin.get("/customer/info?end_user_id=ann")).body == made
    assert (await admin.get("/end_user/list")).body == [made]
    changed = await admin.made("/customer/update", user_id="ann", max_budget=None)
    assert (changed["max_budget"], changed["alias"], changed["litellm_budget_table"]) == (None, "Ann", None)
    deleted = await admin.made("/customer/delete", user_ids=["ann"])
    assert deleted["deleted_customers"] == 1
    assert refused_field(await admin.get("/customer/info?end_user_id=ann")) == (404, "end_user_id")
    for path, body, answer in (
        ("update", {"user_id": "ann"}, (404, "user_id")),
        ("delete", {"user_ids": ["ann"]}, (404, "user_ids")),
        ("unblock", {"user_ids": ["ann"]}, (404, "user_ids")),
        ("new", {"user_id": "bob", "budget_id": "none"}, (404, "budget_id")),
        ("new", {"user_id": "bob", "default_model": "gpt-oss"}, (400, "default_model")),
        ("new", {"user_id": "bob", "object_permission": {"mcp_servers": ["a"]}}, (400, "object_permission")),
    ):
        assert refused_field(await admin.post(f"/customer/{path}", **body)) == answer, (path, body)
    actions = [log["action"] for log in (await admin.get("/audit")).body["audit_logs"]]
    assert actions == ["deleted", "updated", "created"]


async def test_block_applies_to_every_api(admin: AdminClient) -> None:
    key = (await admin.made("/key/generate"))["key"]
    assert [(await ask(admin, "ann", path)).status for path in REQUESTS] == [200, 200, 200]
    (blocked,) = (await admin.made("/customer/block", user_ids=["ann"]))["blocked_users"]
    assert (blocked["user_id"], blocked["blocked"]) == ("ann", True)
    await becomes(admin, "ann", 403)
    for client in (admin, admin.using(key)):
        for path, field in FIELDS.items():
            refused = await ask(client, "ann", path)
            assert refused.status == 403, refused.raw
            assert field in refused.body["error"]["message"]
            assert (await ask(client, "bob", path)).status == 200
    frame = {"type": "response.create", "model": "gpt-oss", **REQUESTS["/v1/responses"]("ann")}
    address = admin.gateway.url.replace("http", "ws", 1) + "/v1/responses"
    async with connect(address, additional_headers={"authorization": f"Bearer {admin.key}"}) as socket:
        await socket.send(json.dumps(frame))
        refused_frame = json.loads(await socket.recv())
        assert (refused_frame["type"], refused_frame["status"]) == ("error", 403)
        # The block concerns this end user, not the connection.
        await socket.send(json.dumps({**frame, "safety_identifier": "bob"}))
        assert json.loads(await socket.recv())["type"] == "response.created"
    assert await admin.made("/customer/unblock", user_ids=["ann"]) == {"blocked_users": []}
    await becomes(admin, "ann", 200)


async def test_limits_apply_to_all_keys_together(admin: AdminClient) -> None:
    await admin.made("/budget/new", budget_id="free", rpm_limit=3)
    await admin.made("/customer/new", user_id="ann", budget_id="free")
    keys = [admin]
    keys += [admin.using((await admin.made("/key/generate", rpm_limit=50))["key"]) for _ in range(2)]
    answers = await asyncio.gather(*(ask(keys[number % 3], "ann") for number in range(9)))
    assert sorted(answer.status for answer in answers) == [200] * 3 + [429] * 6
    messages = {answer.body["error"]["message"] for answer in answers if answer.status == 429}
    assert messages == {"This customer has reached its limit of requests per minute; try again later."}
    # A refused request takes nothing of the limit of its key.
    assert int((await ask(keys[1], "bob")).headers["x-ratelimit-remaining-requests"]) >= 45
    assert (await ask(admin, "bob")).status == 200


async def test_models_of_an_end_user_restrict_any_key(admin: AdminClient) -> None:
    await admin.made("/customer/new", user_id="ann", models=["other"])
    refused = await ask(admin, "ann")
    assert (refused.status, refused.body["error"]["code"]) == (403, "model_not_allowed")


async def test_the_error_for_a_model_says_whether_the_key_or_the_end_user_may_not_use_it(admin: AdminClient) -> None:
    await admin.made("/customer/new", user_id="ann", models=["other"])
    restricted = admin.using((await admin.made("/key/generate", models=["another"]))["key"])

    async def refusal(client: AdminClient, model: str, user: str) -> str:
        answer = await client.gateway.chat_as(client.key, model=model, user=user)
        assert (answer.status, answer.body["error"]["param"]) == (403, "model")
        return str(answer.body["error"]["message"])

    end_user = "This end user may not use the model `{}`; an admin can permit it with /customer/update."
    own = "This key may not use the model `{}`; use a model that `/v1/models` lists."
    # An unknown model is refused like one that exists.
    for model in ("gpt-oss", "missing"):
        assert await refusal(admin, model, "ann") == end_user.format(model)
        assert await refusal(restricted, model, "ann") == own.format(model)
        assert await refusal(restricted, model, "bob") == own.format(model)


@pytest.mark.parametrize("limits", [{}, {"token_budget": 100_000}], ids=["counted", "limited"])
async def test_usage_is_counted(admin: AdminClient, limits: dict[str, Any]) -> None:
    await admin.made("/customer/new", user_id="ann", **limits)
    used = [(await ask(admin, user)).body["usage"]["total_tokens"] for user in ("ann", "ann", "bob")]
    store = admin.gateway.app.state.gateway.store
    (line,) = [
        line for line in await store.ledger("0000-00-00", "9999-99-99") if owner_of(line.account) == ("customer", "ann")
    ]
    assert (line.used.requests, line.used.tokens) == (2, used[0] + used[1])


async def test_strange_names_have_no_entry(admin: AdminClient) -> None:
    for name in ("\x7f", "a\nb", "x" * 300):
        assert (await ask(admin, name)).status == 200
