"""Request records of a running gateway: `GET /v1/requests`, `/v1/requests/{id}` and `/v1/requests/stats`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.administered import administered
from tests.e2e.gateway import Answer, Gateway, config_of
from tests.e2e.keyed import MASTER, bearing, keyed
from tests.fakes import FakeVllm, VllmScript
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
ANSWER = ENCODING.encode_marked("<|channel|>final<|message|>Hello, canary.<|return|>")


@dataclass(frozen=True)
class Team:
    """A gateway with the keys of alice, of the tenant blue, and of bob."""

    gateway: Gateway
    alice: str
    bob: str
    alice_id: str

    async def get(self, path: str, key: str = MASTER) -> Answer:
        return await self.gateway.get(path, **bearing(key))

    async def listed(self, key: str = MASTER, query: str = "", count: int | None = None) -> list[dict[str, Any]]:
        """Return the records of generations, once there are `count`. They are written after the answers."""
        async with asyncio.timeout(10):
            while True:
                answer = await self.get(f"/v1/requests?limit=200{query}", key)
                assert answer.status == 200
                found = [each for each in answer.body["data"] if each["method"] == "POST"]
                if count is None or len(found) >= count:
                    return found
                await asyncio.sleep(0.05)


@pytest.fixture
async def team(tmp_path: Path) -> AsyncIterator[Team]:
    async with FakeVllm(script=lambda _: VllmScript(tokens=ANSWER)) as fake:
        config = config_of(f"vllm@{fake.url}")
        config["model_list"][0]["litellm_params"]["output_cost_per_token"] = 0.00001
        async with keyed(config, tmp_path) as (running, keys):
            record, alice = await keys.issue("blue", name="alice")
            _, bob = await keys.issue(name="bob")
            yield Team(running, alice, bob, record.id)


async def test_the_master_key_sees_all_requests_and_a_key_its_own(team: Team) -> None:
    started = time.time()
    # A request ends after its answer was read, and records of one millisecond are in the order of their ids.
    for key in (team.alice, team.alice, team.bob):
        assert (await team.gateway.chat_as(key)).status == 200
        await asyncio.sleep(0.02)
    failed = await team.gateway.chat_as(team.alice, model="gpt-9")
    assert failed.status == 404
    await asyncio.sleep(0.02)
    unknown = await team.gateway.chat_as("sk-uni-unknown")
    assert unknown.status == 401
    every = await team.listed(count=5)
    assert [each.get("key_name") for each in every] == [None, "alice", "bob", "alice", "alice"]
    assert [each["status"] for each in every] == [401, 404, 200, 200, 200]
    assert all(started <= each["at"] <= time.time() for each in every)
    assert every[0]["id"] == unknown.headers["x-request-id"]
    assert every[2]["cost"] == pytest.approx(0.00001 * len(ANSWER))
    assert "canary" not in json.dumps(every)
    assert all(value is not None for each in every for value in each.values())
    assert [each["key_name"] for each in await team.listed(team.alice)] == ["alice"] * 3
    assert [each["key_name"] for each in await team.listed(team.bob)] == ["bob"]


async def test_requests_are_filtered_and_paged(team: Team) -> None:
    for key in (team.alice, team.bob, team.alice):
        assert (await team.gateway.chat_as(key)).status == 200
    assert (await team.gateway.chat_as(team.bob, model="gpt-9")).status == 404
    await team.listed(count=4)
    for query, count in {
        f"&key={team.alice_id}": 2,
        "&team=blue": 2,
        "&team=red": 0,
        "&model=gpt-oss": 3,
        "&model=gpt-9": 1,
        "&deployment=vllm-1": 3,
        "&deployment=vllm-2": 0,
        "&status=404": 1,
        "&failed=true": 1,
        "&recovery=any": 0,
        f"&since={time.time() + 60}": 0,
        f"&until={time.time() + 60}": 4,
        f"&until={time.time() - 60}": 0,
    }.items():
        assert len(await team.listed(query=query)) == count, query
    reversed_period = await team.get("/v1/requests?since=100&until=50")
    assert (reversed_period.status, reversed_period.body["error"]["param"]) == (400, "until")
    ids, cursor = [], ""
    for _ in range(10):
        page = (await team.get(f"/v1/requests?limit=1&failed=false&model=gpt-oss{cursor}")).body
        ids += [each["id"] for each in page["data"]]
        if not page["has_more"]:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert len(ids) == len(set(ids)) == 3


async def test_reads_of_the_web_page_are_not_stored(team: Team) -> None:
    assert (await team.gateway.chat_as(team.alice)).status == 200
    for path in ("/v1/status", "/status", "/v1/requests", "/v1/requests/stats", "/v1/traces"):
        assert (await team.get(path)).status == 200
    for path in ("/v1/requests/req_none", "/v1/requests/req_none/tokens", "/v1/traces/req_none"):
        assert (await team.get(path)).status == 404
    assert (await team.get("/v1/status", "sk-uni-unknown")).status == 401
    await team.listed(count=1)
    # Records of a moment are written together, so the failed read is the last one.
    async with asyncio.timeout(10):
        while len(found := (await team.get("/v1/requests")).body["data"]) < 2:
            await asyncio.sleep(0.05)
    assert [(each.get("route"), each["status"]) for each in found] == [
        ("/v1/status", 401),
        ("/v1/chat/completions", 200),
    ]


async def test_failed_probes_are_not_stored(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    # No backend works, as during a start.
    config = config_of("vllm@http://127.0.0.1:9", unisono={"request_files": {"path": str(path)}})
    async with keyed(config, tmp_path) as (running, _):
        team = Team(running, MASTER, MASTER, "")
        assert (await team.get("/health/readiness")).status == 503
        assert (await team.get("/metrics", "sk-uni-unknown")).status == 401
        assert (await running.chat_as(MASTER)).status == 503
        await team.listed(count=1)
        routes = [each.get("route") for each in (await team.get("/v1/requests")).body["data"]]
        counts = (await team.get("/v1/requests/stats")).body["data"]
    assert routes == ["/v1/chat/completions", "/metrics"]
    assert sum(each["errors"] for each in counts) == 2
    assert "/health/readiness" not in path.read_text()


async def test_a_record_of_another_key_is_missing(team: Team) -> None:
    assert (await team.gateway.chat_as(team.alice)).status == 200
    [record] = await team.listed(count=1)
    path = f"/v1/requests/{record['id']}"
    assert (await team.get(path)).body == (await team.get(path, team.alice)).body == record
    foreign, missing = await team.get(path, team.bob), await team.get("/v1/requests/req_missing", team.bob)
    assert foreign.status == missing.status == 404
    assert foreign.raw == missing.raw
    assert (await team.get(f"/v1/requests?key={team.alice_id}", team.bob)).body["data"] == []


async def test_counts_over_time(team: Team) -> None:
    for key in (team.alice, team.alice, team.bob):
        assert (await team.gateway.chat_as(key)).status == 200
    assert (await team.gateway.chat_as(team.alice, model="gpt-9")).status == 404
    await team.listed(count=4)

    async def sums(key: str, query: str = "") -> tuple[int, int, int]:
        answer = await team.get(f"/v1/requests/stats?model=gpt-oss{query}", key)
        assert answer.status == 200
        points = answer.body["data"]
        for point in points:
            assert point["at"] % answer.body["step_s"] == 0
            assert 0 < point["duration_s"]["p50"] <= point["duration_s"]["p99"]
            assert point["first_token_s"]["p50"] > 0
        return (
            sum(point["requests"] for point in points),
            sum(point["output_tokens"] for point in points),
            sum(point["errors"] for point in points),
        )

    assert await sums(MASTER) == (3, 3 * len(ANSWER), 0)
    assert await sums(MASTER, "&step=hour") == (3, 3 * len(ANSWER), 0)
    assert await sums(MASTER, f"&key={team.alice_id}") == (2, 2 * len(ANSWER), 0)
    assert await sums(team.bob) == (1, len(ANSWER), 0)
    assert await sums(team.bob, f"&key={team.alice_id}") == (0, 0, 0)
    errors = (await team.get("/v1/requests/stats?model=gpt-9")).body["data"]
    assert [(point["requests"], point["errors"]) for point in errors] == [(1, 1)]


INVALID = {
    "cursor": "/v1/requests?cursor=x",
    "limit": "/v1/requests?limit=1000",
    "status": "/v1/requests?status=0",
    "step": "/v1/requests/stats?step=day",
    "since": "/v1/requests/stats?since=0&step=minute",
    "until": "/v1/requests/stats?since=100&until=50",
    "team": "/v1/requests/stats?team=blue&key=key_1",
}


@pytest.mark.parametrize(("field", "path"), INVALID.items(), ids=INVALID)
async def test_an_invalid_query_names_its_field(team: Team, field: str, path: str) -> None:
    answer = await team.get(path)
    assert (answer.status, answer.body["error"]["param"]) == (400, field)
    assert field in answer.body["error"]["message"]


async def test_no_records_are_stored_if_the_operator_turns_them_off(tmp_path: Path) -> None:
    async with FakeVllm(script=lambda _: VllmScript(tokens=ANSWER)) as fake:
        config = config_of(f"vllm@{fake.url}", unisono={"request_records": {"keep": 0}})
        async with keyed(config, tmp_path) as (running, _):
            assert (await running.chat_as(MASTER)).status == 200
            await asyncio.sleep(0.5)
            assert (await running.get("/v1/requests", **bearing(MASTER))).body["data"] == []


async def test_records_survive_a_restart(tmp_path: Path) -> None:
    async with FakeVllm(script=lambda _: VllmScript(tokens=ANSWER)) as fake:
        config = config_of(f"vllm@{fake.url}")
        async with keyed(config, tmp_path) as (running, _):
            first = await running.chat_as(MASTER)
        async with keyed(config, tmp_path) as (running, _):
            found = await running.get(f"/v1/requests/{first.headers['x-request-id']}", **bearing(MASTER))
    assert (found.status, found.body["output_tokens"]) == (200, len(ANSWER))


async def test_an_admin_of_a_team_sees_the_requests_of_the_team(tmp_path: Path) -> None:
    async with administered(f"sqlite://{tmp_path}/state.db") as master:
        users = {}
        for name, role in (("boss", "admin"), ("member", "user")):
            made = await master.made("/user/new", user_id=name, user_role="internal_user", auto_create_key=False)
            users[role] = made["user_id"]
        members = [{"user_id": name, "role": role} for role, name in users.items()]
        await master.made("/team/new", team_id="blue", members_with_roles=members)
        admin_user = (await master.made("/user/new", user_id="root", user_role="proxy_admin"))["key"]
        keys = {
            role: (await master.made("/key/generate", team_id="blue", user_id=name))["key"]
            for role, name in users.items()
        }
        keys["stranger"] = (await master.made("/key/generate"))["key"]
        ids = {}
        for role, key in keys.items():
            answer = await master.gateway.chat_as(key)
            assert answer.status == 200
            ids[role] = answer.headers["x-request-id"]

        async def seen(key: str, query: str = "") -> set[str]:
            found = (await master.using(key).get(f"/v1/requests?limit=200{query}")).body["data"]
            return {each["id"] for each in found} & set(ids.values())

        async with asyncio.timeout(10):
            while len(await seen(MASTER)) < 3:
                await asyncio.sleep(0.05)
        assert await seen(admin_user) == set(ids.values())
        assert await seen(keys["admin"], "&team=blue") == {ids["admin"], ids["user"]}
        assert await seen(keys["admin"]) == {ids["admin"]}
        assert await seen(keys["admin"], "&team=red") == set()
        assert await seen(keys["user"], "&team=blue") == {ids["user"]}
        assert await seen(keys["stranger"], "&team=blue") == set()

        async def counted(key: str, query: str = "") -> int:
            points = (await master.using(key).get(f"/v1/requests/stats?model=gpt-oss{query}")).body["data"]
            return sum(point["requests"] for point in points)

        assert [await counted(MASTER), await counted(admin_user, "&team=blue")] == [3, 2]
        assert [await counted(keys["admin"], "&team=blue"), await counted(keys["admin"])] == [2, 1]
        assert [await counted(keys["user"], "&team=blue"), await counted(keys["stranger"], "&team=blue")] == [1, 0]
        statuses = [
            (await master.using(keys[role]).get(f"/v1/requests/{ids['user']}")).status
            for role in ("admin", "user", "stranger")
        ]
        assert statuses == [200, 200, 404]
