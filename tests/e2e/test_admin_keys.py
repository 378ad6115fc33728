"""Keys over the admin API, in LiteLLM's format, on both stores."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.e2e.administered import AdminClient
from tests.e2e.gateway import Answer


async def works(admin: AdminClient, key: str) -> int:
    return (await admin.gateway.chat_as(key)).status


async def becomes(admin: AdminClient, key: str, status: int) -> None:
    """Wait until chat requests with the key get this status: a process caches keys."""
    while await works(admin, key) != status:
        await asyncio.sleep(0.05)


def refused_field(answer: Answer) -> tuple[int, str | None]:
    return answer.status, answer.body["error"]["param"]


SETTINGS: dict[str, Any] = {
    "key_alias": "ci",
    "models": ["gpt-oss"],
    "max_budget": 12.5,
    "budget_duration": "30d",
    "rpm_limit": 60,
    "tpm_limit": 100_000,
    "max_parallel_requests": 4,
    "metadata": {"cost centre": 42},
    "tags": ["nightly"],
}


async def test_generated_key_works_and_reads_back_what_was_sent(admin: AdminClient) -> None:
    made = await admin.made("/key/generate", **SETTINGS, duration="30d")
    assert await works(admin, made["key"]) == 200
    info = (await admin.get(f"/key/info?key={made['token']}")).body
    assert info["key"] == made["token"]
    assert {name: info["info"][name] for name in SETTINGS if name != "metadata"} == {
        name: value for name, value in SETTINGS.items() if name != "metadata"
    }
    assert info["info"]["metadata"]["cost centre"] == 42
    assert made["expires"] == info["info"]["expires"]
    assert info["info"]["status"] == "active"
    assert made["key"] not in str(info)
    # The secret names the key too, and is not repeated.
    by_secret = (await admin.get(f"/key/info?key={made['key']}")).body
    assert by_secret == info


async def test_key_without_settings_has_no_limits(admin: AdminClient) -> None:
    made = await admin.made("/key/generate")
    assert (made["models"], made["max_budget"], made["rpm_limit"], made["team_id"]) == ([], None, None, None)
    assert await works(admin, made["key"]) == 200


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"colour": "red"}, "colour"),
    "field that does not apply": ({"organization_id": "org"}, "organization_id"),
    "own secret": ({"key": "sk-mine"}, "key"),
    "spend": ({"spend": 3}, "spend"),
    "negative budget": ({"max_budget": -1}, "max_budget"),
    "budget below a millionth": ({"max_budget": 1e-9}, "max_budget"),
    "text as a number": ({"rpm_limit": "5"}, "rpm_limit"),
    "boolean as a number": ({"rpm_limit": True}, "rpm_limit"),
    "impossible period": ({"budget_duration": "soon"}, "budget_duration"),
    "zero duration": ({"duration": "0s"}, "duration"),
    "huge duration": ({"duration": "9999999999w"}, "duration"),
    "tags that are no strings": ({"tags": [1]}, "tags.0"),
    "large metadata": ({"metadata": {"a": "x" * 20_000}}, "metadata"),
    "alias of two lines": ({"key_alias": "a\nb"}, "key_alias"),
    "unknown tool permission": ({"object_permission": {"agents": ["x"]}}, "object_permission.agents"),
}


async def test_invalid_field_is_named(admin: AdminClient) -> None:
    for name, (body, field) in INVALID.items():
        assert refused_field(await admin.post("/key/generate", **body)) == (400, field), name
    assert (await admin.get("/key/list")).body["total_count"] == 0


async def test_unknown_team_user_and_budget_are_named(admin: AdminClient) -> None:
    for field in ("team_id", "user_id", "budget_id"):
        assert refused_field(await admin.post("/key/generate", **{field: "nobody"})) == (404, field)


async def test_values_that_request_nothing_are_accepted(admin: AdminClient) -> None:
    await admin.made(
        "/key/generate",
        aliases={},
        config={},
        permissions={},
        spend=0,
        guardrails=[],
        send_invite_email=False,
        key=None,
    )


async def test_repeated_creation_makes_one_key(admin: AdminClient) -> None:
    first = await admin.made("/key/generate", key_alias="ci", rpm_limit=5)
    answers = await asyncio.gather(*(admin.post("/key/generate", key_alias="ci", rpm_limit=5) for _ in range(5)))
    assert {(answer.status, answer.body["key"]) for answer in answers} == {(200, first["key"])}
    assert refused_field(await admin.post("/key/generate", key_alias="ci", rpm_limit=6)) == (400, "key_alias")

    headers = {"idempotency-key": "one"}
    answers = await asyncio.gather(*(admin.post("/key/generate", headers, rpm_limit=5) for _ in range(5)))
    assert len({answer.body["key"] for answer in answers}) == 1
    assert (await admin.post("/key/generate", headers, rpm_limit=6)).status == 409
    assert (await admin.get("/key/list")).body["total_count"] == 2
    assert await works(admin, answers[0].body["key"]) == 200


async def test_deleted_secret_is_never_created_again(admin: AdminClient) -> None:
    first = await admin.made("/key/generate", key_alias="ci")
    await admin.made("/key/delete", key_aliases=["ci"])
    second = await admin.made("/key/generate", key_alias="ci")
    assert second["key"] != first["key"]
    await becomes(admin, first["key"], 401)
    assert await works(admin, second["key"]) == 200


async def test_keys_are_listed_in_pages(admin: AdminClient) -> None:
    ids = [(await admin.made("/key/generate", key_alias=f"key {number}"))["token"] for number in range(5)]
    pages = [(await admin.get(f"/key/list?page={page}&size=2")).body for page in (1, 2, 3, 4)]
    assert [page["keys"] for page in pages] == [ids[:2:-1], ids[2:0:-1], ids[:1], []]
    assert {(page["total_count"], page["total_pages"]) for page in pages} == {(5, 3)}
    (found,) = (await admin.get("/key/list?key_alias=key%203&return_full_object=true")).body["keys"]
    assert found["token"] == ids[3]
    for query, field in (("page=0", "page"), ("size=101", "size"), ("status=odd", "status"), ("page=x", "page")):
        assert refused_field(await admin.get(f"/key/list?{query}")) == (400, field)


async def test_update_changes_only_what_is_sent(admin: AdminClient) -> None:
    made = await admin.made("/key/generate", **SETTINGS)
    changed = await admin.made("/key/update", key=made["token"], rpm_limit=None, models=[], key_alias="nightly")
    before = {name: made[name] for name in SETTINGS}
    assert {name: changed[name] for name in SETTINGS} == before | {
        "rpm_limit": None,
        "models": [],
        "key_alias": "nightly",
    }
    # The old alias is free, the new one is not.
    await admin.made("/key/generate", key_alias="ci")
    assert refused_field(await admin.post("/key/generate", key_alias="nightly")) == (400, "key_alias")
    assert refused_field(await admin.post("/key/update", rpm_limit=1)) == (400, "key")
    assert refused_field(await admin.post("/key/update", key="key_none", rpm_limit=1)) == (404, "key")
    moved = await admin.post("/key/update", key=made["token"], team_id="other")
    assert refused_field(moved) == (400, "team_id")


async def test_null_removes_every_setting_except_object_permission(admin: AdminClient) -> None:
    plain = await admin.made("/key/generate")
    settings = {**SETTINGS, "duration": "30d", "soft_budget": 1.0, "raw": True}
    permission = {"mcp_servers": list[str]()}
    made = await admin.made("/key/generate", **settings, object_permission=permission)
    await admin.made("/key/update", key=made["token"], **dict.fromkeys(settings), object_permission=None)
    names = {*settings, "expires"} - {"metadata"}
    shown, expected = [(await admin.get(f"/key/info?key={key['token']}")).body["info"] for key in (made, plain)]
    assert {name: shown.get(name) for name in names} == {name: expected.get(name) for name in names}
    assert "cost centre" not in shown["metadata"]
    # As in LiteLLM, null does not change the permission.
    assert shown["object_permission"]["mcp_servers"] == []
    changed = await admin.made("/key/update", key=made["token"], object_permission={"mcp_servers": None})
    assert changed["object_permission"] is None


async def test_blocked_key_works_again_after_it_is_unblocked(admin: AdminClient) -> None:
    key = (await admin.made("/key/generate"))["key"]
    assert (await admin.made("/key/block", key=key))["blocked"] is True
    await becomes(admin, key, 401)
    assert (await admin.made("/key/unblock", key=key))["blocked"] is False
    await becomes(admin, key, 200)


async def test_deleted_key_is_refused_and_missing(admin: AdminClient) -> None:
    made = await admin.made("/key/generate")
    assert await admin.made("/key/delete", keys=[made["token"]]) == {"deleted_keys": [made["token"]]}
    await becomes(admin, made["key"], 401)
    assert (await admin.get(f"/key/info?key={made['token']}")).status == 404
    assert (await admin.get("/key/list")).body["keys"] == []
    assert (await admin.get("/key/list?status=deleted")).body["keys"] == [made["token"]]
    # All or none.
    other = await admin.made("/key/generate")
    assert refused_field(await admin.post("/key/delete", keys=[other["token"], "key_none"])) == (404, "keys")
    assert await works(admin, other["key"]) == 200
    assert refused_field(await admin.post("/key/delete")) == (400, "keys")


async def test_regenerated_key_keeps_its_settings(admin: AdminClient) -> None:
    made = await admin.made("/key/generate", **SETTINGS)
    new = await admin.made("/key/regenerate", key=made["token"], grace_period="1h", rpm_limit=70)
    assert new["key"] != made["key"]
    assert new["token"] == made["token"]
    assert (new["rpm_limit"], new["key_alias"]) == (70, "ci")
    assert [await works(admin, key) for key in (made["key"], new["key"])] == [200, 200]
    newest = await admin.made("/key/regenerate", key=made["token"])
    await becomes(admin, made["key"], 401)
    assert await works(admin, newest["key"]) == 200
    # The path may name the key, and the body may be missing.
    named = await admin.gateway.post(f"/key/{made['token']}/regenerate", b"", authorization=f"Bearer {admin.key}")
    assert (named.status, named.body["token"]) == (200, made["token"])
    assert refused_field(await admin.post(f"/key/{made['token']}/regenerate", key="key_none")) == (400, "key")
    assert refused_field(await admin.post("/key/key_none/regenerate")) == (404, "key")
    # A repeated creation must not return the first secret. The error names what identifies the key in the request.
    assert refused_field(await admin.post("/key/generate", **SETTINGS)) == (400, "key_alias")
    once = (await admin.post("/key/generate", {"idempotency-key": "one"})).body
    await admin.made("/key/regenerate", key=once["token"])
    refused = await admin.post("/key/generate", {"idempotency-key": "one"})
    assert (refused.status, refused.body["error"]["code"]) == (409, "state_conflict")
    assert "use another Idempotency-Key" in refused.body["error"]["message"]


async def test_regeneration_checks_the_alias_and_the_budget(admin: AdminClient) -> None:
    taken = await admin.made("/key/generate", key_alias="prod")
    made = await admin.made("/key/generate", key_alias="old")
    id = made["token"]
    assert refused_field(await admin.post("/key/regenerate", key=id, key_alias="prod")) == (400, "key_alias")
    assert refused_field(await admin.post("/key/regenerate", key=id, budget_id="typo")) == (404, "budget_id")
    # A refused request changes nothing.
    assert await works(admin, made["key"]) == 200
    assert (await admin.made("/key/regenerate", key=id, key_alias="new"))["key_alias"] == "new"
    # The old alias is free, the new one is not.
    assert (await admin.made("/key/generate", key_alias="old"))["token"] != id
    assert refused_field(await admin.post("/key/generate", key_alias="new")) == (400, "key_alias")
    await admin.made("/key/delete", key_aliases=["prod"])
    await becomes(admin, taken["key"], 401)


async def test_spend_is_that_of_the_ledger(admin: AdminClient) -> None:
    made = await admin.made("/key/generate")
    assert (await admin.get(f"/key/info?key={made['token']}")).body["info"]["spend"] == 0


async def test_every_change_has_an_audit_record(admin: AdminClient) -> None:
    made = await admin.made("/key/generate", key_alias="ci")
    await admin.made("/key/update", key=made["token"], rpm_limit=5)
    # A change that changes nothing is none.
    await admin.made("/key/update", key=made["token"], rpm_limit=5)
    await admin.made("/key/block", key=made["token"])
    await admin.made("/key/unblock", key=made["token"])
    await admin.made("/key/regenerate", key=made["token"])
    await admin.made("/key/delete", keys=[made["token"]])
    page = (await admin.get("/audit?page_size=4")).body
    assert (page["total"], page["total_pages"]) == (6, 2)
    logs = page["audit_logs"] + (await admin.get("/audit?page_size=4&page=2")).body["audit_logs"]
    assert [log["action"] for log in logs] == ["deleted", "rotated", "unblocked", "blocked", "updated", "created"]
    assert {(log["changed_by"], log["table_name"], log["object_id"]) for log in logs} == {
        ("master_key", "key", made["token"])
    }
    updated = logs[4]
    assert (updated["before_value"]["rpm_limit"], updated["updated_values"]["rpm_limit"]) == (None, 5)
    assert logs[5]["before_value"] is None
    # No record has a secret or its digest.
    assert made["key"] not in str(logs)


async def test_virtual_key_reads_itself_alone(admin: AdminClient) -> None:
    own, other = await admin.made("/key/generate"), await admin.made("/key/generate")
    caller = admin.using(own["key"])
    info = (await caller.get("/key/info")).body
    assert info["key"] == own["token"]
    assert (await caller.get("/key/list")).body["keys"] == [own["token"]]
    foreign, missing = await caller.get(f"/key/info?key={other['token']}"), await caller.get("/key/info?key=key_none")
    assert foreign.status == missing.status == 404
    assert foreign.raw.replace(other["token"].encode(), b"key_none") == missing.raw
    for path in ("/key/generate", "/key/update", "/key/delete", "/key/block", "/key/unblock", "/key/regenerate"):
        assert (await caller.post(path, key=own["token"])).status == 403
    assert (await caller.get("/audit")).status == 403


async def test_master_key_has_no_info(admin: AdminClient) -> None:
    assert refused_field(await admin.get("/key/info")) == (400, "key")
