"""Spend reports, backend health and the tokenizer over HTTP, compared with the ledger and the backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.e2e.administered import ENCODING, AdminClient, administered
from tests.e2e.test_admin_keys import refused_field

# Fields of LiteLLM's `DailySpendMetadata`.
LITELLM_TOTALS = frozenset(
    (
        *("total_spend", "total_prompt_tokens", "total_completion_tokens", "total_tokens", "total_api_requests"),
        *("total_successful_requests", "total_failed_requests", "total_cache_read_input_tokens"),
        *("total_cache_creation_input_tokens", "page", "total_pages", "has_more"),
    )
)
# USD per million tokens.
PRICE = {"input": 1000.0, "output": 2000.0}


@pytest.fixture
async def admin(store_address: str) -> AsyncIterator[AdminClient]:
    async with administered(store_address, price=PRICE) as running:
        yield running


def today() -> str:
    return datetime.now(UTC).date().isoformat()


async def spent_by(admin: AdminClient, key: str, times: int = 1) -> float:
    """Send requests and return their cost by the usage in the answers."""
    total = 0.0
    for _ in range(times):
        usage = (await admin.gateway.chat_as(key)).body["usage"]
        total += (usage["prompt_tokens"] * PRICE["input"] + usage["completion_tokens"] * PRICE["output"]) / 1e6
    return round(total, 6)


async def used(admin: AdminClient) -> dict[str, Any]:
    """Create a team with two keys of two users, and use them."""
    await admin.made("/team/new", team_id="search")
    for user in ("ann", "bob"):
        await admin.made("/user/new", user_id=user, auto_create_key=False)
    ann = await admin.made("/key/generate", team_id="search", user_id="ann", tags=["nightly", "all"])
    bob = await admin.made("/key/generate", user_id="bob", tags=["all"])
    return {
        "ann": (ann, await spent_by(admin, ann["key"], 2)),
        "bob": (bob, await spent_by(admin, bob["key"])),
        "master": await spent_by(admin, admin.key),
    }


async def test_reports_equal_the_usage_in_the_answers(admin: AdminClient) -> None:
    found = await used(admin)
    (ann, ann_usd), (bob, bob_usd), master_usd = found["ann"], found["bob"], found["master"]
    total = pytest.approx(ann_usd + bob_usd + master_usd, abs=1e-9)
    assert (await admin.get(f"/key/info?key={ann['token']}")).body["info"]["spend"] == ann_usd
    listed = (await admin.get("/key/list?return_full_object=true")).body["keys"]
    assert {key["token"]: key["spend"] for key in listed} == {ann["token"]: ann_usd, bob["token"]: bob_usd}
    assert (await admin.get("/team/info?team_id=search")).body["team_info"]["spend"] == ann_usd
    assert (await admin.get("/user/info?user_id=bob")).body["user_info"]["spend"] == bob_usd

    keys = (await admin.get("/spend/keys")).body
    assert (keys[0]["token"], keys[0]["spend"]) == (ann["token"], ann_usd)
    assert sum(key["spend"] for key in keys) == total
    users = (await admin.get("/spend/users")).body
    assert [(user["user_id"], user["spend"]) for user in users] == [("ann", ann_usd), ("bob", bob_usd)]
    tags = (await admin.get("/spend/tags")).body
    assert [(tag["individual_request_tag"], tag["log_count"]) for tag in tags] == [("all", 3), ("nightly", 2)]
    assert tags[1]["total_spend"] == ann_usd

    (day,) = (await admin.get("/spend/logs")).body
    assert (day["startTime"], day["spend"], day["users"]["ann"]) == (today(), total, ann_usd)
    assert day[ann["token"]] == ann_usd
    (only,) = (await admin.get("/spend/logs?user_id=bob")).body
    assert only["spend"] == bob_usd

    (report,) = (await admin.get("/global/spend/report?group_by=team")).body
    assert [(team["team_name"], team["total_spend"]) for team in report["teams"]][1] == ("search", ann_usd)
    by_key = (await admin.get("/global/spend/report?group_by=api_key")).body
    assert {each["api_key"]: each["total_cost"] for each in by_key}[bob["token"]] == bob_usd

    activity = (await admin.get(f"/user/daily/activity?start_date={today()}&end_date={today()}")).body
    assert activity["metadata"]["total_spend"] == total
    assert activity["metadata"]["total_api_requests"] == 4
    assert set(activity["metadata"]) >= LITELLM_TOTALS
    metrics = activity["results"][0]["metrics"]
    assert activity["metadata"]["total_tokens"] == metrics["total_tokens"] > 0
    (result,) = activity["results"]
    assert result["breakdown"]["api_keys"][bob["token"]]["metrics"]["spend"] == bob_usd


async def test_spend_of_a_deleted_key_stays_with_its_user(admin: AdminClient) -> None:
    ann, usd = (await used(admin))["ann"]
    await admin.made("/key/delete", keys=[ann["token"]])
    assert (await admin.get("/spend/users?user_id=ann")).body[0]["spend"] == usd


async def test_a_key_sees_its_own_spend_only(admin: AdminClient) -> None:
    found = await used(admin)
    bob, usd = found["bob"]
    client = admin.using(bob["key"])
    assert [(key["token"], key["spend"]) for key in (await client.get("/spend/keys")).body] == [(bob["token"], usd)]
    assert [day["spend"] for day in (await client.get("/spend/logs")).body] == [usd]
    assert (await client.get(f"/spend/logs?api_key={found['ann'][0]['token']}")).body == []
    assert (await client.get("/user/daily/activity")).body["metadata"]["total_spend"] == usd
    assert [tag["individual_request_tag"] for tag in (await client.get("/spend/tags")).body] == ["all"]
    assert (await client.get("/global/spend/report")).status == 403


async def recorded(admin: AdminClient, number: int, query: str = "") -> list[dict[str, Any]]:
    """Wait until that many requests are recorded, and return them."""
    rows: list[dict[str, Any]] = []
    while len(rows) < number:
        rows = (await admin.get(f"/spend/logs?summarize=false&{query}")).body
        await asyncio.sleep(0.05)
    return rows


async def test_single_requests_are_listed_from_the_records(admin: AdminClient) -> None:
    found = await used(admin)
    (ann, ann_usd), (bob, bob_usd), _ = found["ann"], found["bob"], found["master"]
    # The requests of the admin API are none of a model.
    rows = await recorded(admin, 4)
    assert [row["api_key"] for row in rows] == ["master_key", bob["token"], ann["token"], ann["token"]]
    assert sum(row["spend"] for row in rows[2:]) == pytest.approx(ann_usd, abs=1e-9)
    first = rows[1]
    assert (first["user"], first["team_id"], first["model_group"], first["status"]) == (
        "bob",
        None,
        "gpt-oss",
        "success",
    )
    assert first["prompt_tokens"] + first["completion_tokens"] == first["total_tokens"] > 0
    (one,) = (await admin.get(f"/spend/logs?request_id={first['request_id']}")).body
    assert one == first
    assert (await admin.get("/spend/logs?request_id=req_none")).body == []
    for name in ("api_key", "model", "user_id", "team_id", "end_date"):
        other = "2020-01-01" if name == "end_date" else "other"
        assert (await admin.get(f"/spend/logs?request_id={first['request_id']}&{name}={other}")).body == []
    assert (await admin.get(f"/spend/logs?request_id={first['request_id']}&model={first['model_group']}")).body == [one]
    for query, keys in (
        ("user_id=ann", [ann["token"]] * 2),
        ("team_id=search&page_size=1", [ann["token"]]),
        (f"api_key={bob['token']}&start_date={today()}&end_date={today()}", [bob["token"]]),
        ("api_key=master_key", ["master_key"]),
        ("user_id=ann&page_size=1&page=3", []),
        ("end_date=2000-01-01", []),
        ("model=none", []),
    ):
        answer = (await admin.get(f"/spend/logs?summarize=false&{query}")).body
        assert [row["api_key"] for row in answer] == keys, query
    # A key sees its own requests only.
    client = admin.using(bob["key"])
    assert [row["spend"] for row in await recorded(client, 1)] == [bob_usd]
    assert await recorded(client, 0, f"api_key={ann['token']}") == []
    foreign, missing = rows[2]["request_id"], "req_none"
    answers = {(await client.get(f"/spend/logs?request_id={id}")).raw for id in (foreign, missing)}
    assert answers == {b"[]"}


async def test_deleting_a_user_deletes_the_records_of_its_requests(admin: AdminClient) -> None:
    await used(admin)
    await recorded(admin, 4)
    await admin.made("/user/delete", user_ids=["ann"])
    assert "ann" not in str(await recorded(admin, 2))
    assert len(await recorded(admin, 2)) == 2


async def test_prices_of_models_are_those_of_the_configuration(admin: AdminClient) -> None:
    (model,) = (await admin.get("/model/info")).body["data"]
    (group,) = (await admin.get("/model_group/info")).body["data"]
    for each in (model["model_info"], group):
        assert each["input_cost_per_token"] == PRICE["input"] / 1e6
        assert each["output_cost_per_token"] == PRICE["output"] / 1e6


async def test_invalid_queries_name_the_field(admin: AdminClient) -> None:
    for query, field in (
        ("start_date=yesterday", "start_date"),
        ("page_size=0", "page_size"),
    ):
        assert refused_field(await admin.get(f"/spend/logs?{query}")) == (400, field)
    assert refused_field(await admin.get("/global/spend/report?group_by=customer")) == (400, "group_by")


async def test_health_lists_every_deployment(admin: AdminClient) -> None:
    await spent_by(admin, admin.key)
    report = (await admin.get("/health")).body
    assert (report["healthy_count"], report["unhealthy_count"]) == (1, 0)
    assert report["healthy_endpoints"][0]["model_group"] == "gpt-oss"
    # Addresses stay with the configuration.
    assert "127.0.0.1" not in str(report)
    key = await admin.made("/key/generate")
    assert (await admin.using(key["key"]).get("/health")).status == 403


async def test_model_group_info_lists_the_models_of_the_key(admin: AdminClient) -> None:
    key = await admin.made("/key/generate", models=["other"])
    assert [group["model_group"] for group in (await admin.get("/model_group/info")).body["data"]] == ["gpt-oss"]
    assert (await admin.get("/model_group/info?model_group=none")).body["data"] == []
    assert (await admin.using(key["key"]).get("/model_group/info")).body["data"] == []


async def test_text_survives_tokenizing_and_detokenizing(admin: AdminClient) -> None:
    text = "Grüße, 世界! <|start|> 🔑"
    tokens = await admin.made("/tokenize", model="gpt-oss", prompt=text, return_token_strs=True)
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["tokens"] == ENCODING.encode_as_server(text)
    assert (await admin.made("/detokenize", model="gpt-oss", tokens=tokens["tokens"]))["prompt"] == text
    counted = await admin.made("/utils/token_counter", model="gpt-oss", prompt=text)
    assert (counted["total_tokens"], counted["model_used"]) == (tokens["count"], "gpt-oss")


async def test_counted_messages_equal_the_prompt_tokens_of_the_answer(admin: AdminClient) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    usage = (await admin.gateway.chat_as(admin.key)).body["usage"]
    counted = await admin.made("/utils/token_counter", model="gpt-oss", messages=messages)
    assert counted["total_tokens"] == usage["prompt_tokens"]


INVALID: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "no text": ("/tokenize", {"model": "gpt-oss"}, 400, "prompt"),
    "both": ("/utils/token_counter", {"model": "gpt-oss", "prompt": "a", "messages": []}, 400, "prompt"),
    "unknown model": ("/tokenize", {"model": "none", "prompt": "a"}, 404, "model"),
    "unknown token": ("/detokenize", {"model": "gpt-oss", "tokens": [999_999_999]}, 400, "tokens"),
    "huge token": ("/detokenize", {"model": "gpt-oss", "tokens": [2**63]}, 400, "tokens"),
    "negative token": ("/detokenize", {"model": "gpt-oss", "tokens": [-1]}, 400, "tokens.0"),
    "unknown field": ("/tokenize", {"model": "gpt-oss", "prompt": "a", "colour": 1}, 400, "colour"),
}


async def test_invalid_tokenizer_field_is_named(admin: AdminClient) -> None:
    for name, (path, body, status, field) in INVALID.items():
        assert refused_field(await admin.post(path, **body)) == (status, field), name


async def test_tokenizer_obeys_the_models_of_a_key(admin: AdminClient) -> None:
    key = await admin.made("/key/generate", models=["other"])
    client = admin.using(key["key"])
    answers = await asyncio.gather(
        client.post("/tokenize", model="gpt-oss", prompt="a"),
        client.post("/detokenize", model="gpt-oss", tokens=[1]),
        client.post("/utils/token_counter", model="gpt-oss", prompt="a"),
    )
    assert {refused_field(answer) for answer in answers} == {(403, "model")}
