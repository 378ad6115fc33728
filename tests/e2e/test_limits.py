"""Limits and budgets over real sockets, through two processes and under parallel load.

Counts are exact; headers and errors are those that clients know.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.contract.servers import Server
from tests.e2e.gateway import config_of, gateway, message_of
from tests.e2e.keyed import MASTER, Ring, bearing, keyed, ring, with_keys
from tests.e2e.replicas import replica
from tests.fakes import FakeVllm
from unisono.core.access import shared_account
from unisono.core.budget_period import Period
from unisono.core.directory import DirectoryEntry, EntryKind
from unisono.core.quotas import Account, KeyLimits, QuotaReservation
from unisono.harmony.encoding import load_encoding

pytestmark = pytest.mark.timeout(180)

ENCODING = load_encoding()
ANSWER = ENCODING.encode_marked("<|channel|>final<|message|>Hello.<|return|>")
LONG = ENCODING.encode_marked("<|channel|>final<|message|>" + "la " * 60 + "<|return|>")
CLIENTS = 50
# Lease of reservations, in seconds.
LEASE_S = 2.0


def config_with_price(url: str, **price: float) -> dict[str, Any]:
    config = config_of(f"vllm@{url}")
    config["model_list"][0]["unisono"] = {"price": price}
    return config


# Exact counts under parallel load


@asynccontextmanager
async def gateways(kind: str, folder: Path, redis: Server, url: str) -> AsyncIterator[tuple[list[str], Ring]]:
    """Start gateways and return their URLs: two on one Redis, or one with two workers on a file."""
    address = redis.url if kind == "redis" else f"sqlite://{folder}/state.db"
    config = with_keys(config_of(f"vllm@{url}"), address)
    # The counts are under test, not how a busy machine meets a short deadline.
    config["store"]["deadline_s"] = 5.0
    workers = () if kind == "redis" else ("--workers", "2")
    async with AsyncExitStack() as stack:
        count = 2 if kind == "redis" else 1
        starting = [stack.enter_async_context(replica(folder / f"{n}", config, *workers)) for n in range(count)]
        replicas = await asyncio.gather(*starting)
        yield [replica_.url for replica_ in replicas], await stack.enter_async_context(ring(address))


# Each request has a prompt of three bytes, estimated as 101 tokens, and may generate 24: it reserves 125 tokens.
LIMITS = {
    "requests": (KeyLimits(rpm=17), 17),
    "parallel requests": (KeyLimits(max_parallel=9), 9),
    "tokens": (KeyLimits(tpm=1250), 10),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis", "file"])
async def test_of_fifty_parallel_requests_exactly_the_limit_passes(
    kind: str, tmp_path: Path, redis_server: Server
) -> None:
    # No answer ends before all requests are accepted or rejected.
    async with (
        FakeVllm(tokens=ANSWER, first_delay_s=4.0) as fake,
        gateways(kind, tmp_path, redis_server, fake.url) as (urls, keys),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session,
    ):
        for name, (limits, expected) in LIMITS.items():
            _, key = await keys.issue(limits=limits)
            responses = await asyncio.gather(
                *(chat(session, urls[n % len(urls)], key, max_tokens=24) for n in range(CLIENTS))
            )
            counts = Counter(status for status, _, _ in responses)
            assert counts == {200: expected, 429: CLIENTS - expected}, name
            for status, headers, body in responses:
                if status == 429:
                    assert body["error"]["code"] == "rate_limit_exceeded"
                    assert int(headers["retry-after"]) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis", "file"])
async def test_of_fifty_requests_exactly_the_tightest_limit_of_key_user_and_team_passes(
    kind: str, tmp_path: Path, redis_server: Server
) -> None:
    async with (
        FakeVllm(tokens=ANSWER, first_delay_s=4.0) as fake,
        gateways(kind, tmp_path, redis_server, fake.url) as (urls, keys),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session,
    ):
        for tightest in ("key", "user", "team"):
            limits = {owner: KeyLimits(rpm=11 if owner == tightest else 30) for owner in ("key", "user", "team")}
            names = {each: f"{each} of {tightest}" for each in (EntryKind.USER, EntryKind.TEAM)}
            for owner, name in names.items():
                await keys.store.put_entry(DirectoryEntry(owner, name, time.time(), limits=limits[owner]))
            _, key = await keys.issue(names[EntryKind.TEAM], limits["key"], user=names[EntryKind.USER])
            responses = await asyncio.gather(
                *(chat(session, urls[n % len(urls)], key, max_tokens=24) for n in range(CLIENTS))
            )
            assert Counter(status for status, _, _ in responses) == {200: 11, 429: CLIENTS - 11}
            # Refused requests took nothing of the other limits.
            for owner, name in names.items():
                if owner != tightest:
                    account = shared_account(DirectoryEntry(owner, name, 0.0))
                    probe = QuotaReservation(account, "probe", limits[owner], 1, 1, 1, 30.0)
                    assert (await keys.store.reserve(probe)).requests_left == 30 - 11 - 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis", "file"])
async def test_reservations_of_a_killed_gateway_lapse_for_key_user_and_team(
    kind: str, tmp_path: Path, redis_server: Server
) -> None:
    """Two gateways with two workers each; one is killed while its requests hold reservations."""
    address = redis_server.url if kind == "redis" else f"sqlite://{tmp_path}/state.db"
    async with (
        FakeVllm(tokens=ANSWER, first_delay_s=8.0) as fake,
        ring(address) as keys,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session,
        AsyncExitStack() as stack,
    ):
        config = with_keys(config_of(f"vllm@{fake.url}"), address)
        config["store"] |= {"deadline_s": 5.0, "lease_s": LEASE_S}
        starting = [stack.enter_async_context(replica(tmp_path / f"{n}", config, "--workers", "2")) for n in range(2)]
        replicas = await asyncio.gather(*starting)
        limits = {"key": KeyLimits(max_parallel=30), "user": KeyLimits(max_parallel=9), "team": KeyLimits(rpm=1000)}
        for owner in (EntryKind.USER, EntryKind.TEAM):
            await keys.store.put_entry(DirectoryEntry(owner, f"{owner} k", time.time(), limits=limits[owner]))
        record, key = await keys.issue("team k", limits["key"], user="user k")
        asked = [asyncio.create_task(chat(session, replicas[n % 2].url, key, max_tokens=24)) for n in range(CLIENTS)]
        async with asyncio.timeout(60):
            while sum(each.done() for each in asked) < CLIENTS - 9:
                await asyncio.sleep(0.05)
        assert all(each.result()[0] == 429 for each in asked if each.done())
        # The accepted requests may all be on one gateway: kill one that has some.
        accepted = [n % 2 for n, each in enumerate(asked) if not each.done()]
        killed = replicas[accepted[0]]
        for pid in (*children(killed.pid), killed.pid):
            os.kill(pid, signal.SIGKILL)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        # Exactly as many as the tightest limit allows reached the backend; those of the killed gateway broke.
        assert len(fake.requests) == 9
        broken = sum(isinstance(each, BaseException) for each in answers)
        statuses = Counter(each[0] for each in answers if not isinstance(each, BaseException))
        assert broken == accepted.count(accepted[0])
        assert (statuses[200], statuses[429]) == (9 - broken, CLIENTS - 9)
        await asyncio.sleep(LEASE_S + 1)
        accounts = {"key": Account("team k", record.id)}
        owners = [DirectoryEntry(owner, f"{owner} k", 0.0) for owner in (EntryKind.USER, EntryKind.TEAM)]
        accounts |= {owner.kind.value: shared_account(owner) for owner in owners}
        for owner, account in accounts.items():
            most = limits[owner].max_parallel or 20
            probes = [QuotaReservation(account, f"probe {n}", limits[owner], 1, 1, 1, 30.0) for n in range(most)]
            refused = [(await keys.store.reserve(probe)).refused for probe in probes]
            assert not any(refused), owner


def children(pid: int) -> list[int]:
    """Return the worker processes of a gateway."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def chat(session: aiohttp.ClientSession, url: str, key: str, **fields: Any) -> tuple[int, Any, Any]:
    body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi!"}], **fields}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=bearing(key)) as response:
        return response.status, response.headers, await response.json()


# Rate limit headers


@pytest.mark.parametrize(
    ("limits", "name"), [(KeyLimits(rpm=0), "requests"), (KeyLimits(tpm=0), "tokens"), (KeyLimits(tpm=50), "tokens")]
)
async def test_the_reset_of_a_limit_is_not_before_the_retry_delay(limits: KeyLimits, name: str, tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=limits)
        refused = await running.chat_as(key)
    assert (refused.status, refused.headers["retry-after"]) == (429, "86400")
    assert refused.headers[f"x-ratelimit-reset-{name}"] == "1440m0s"


async def test_rate_limit_headers_report_the_remaining_quota_on_every_api(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=KeyLimits(rpm=8, tpm=100_000))
        headers = {**bearing(key)}
        bodies: Sequence[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "stream": True}),
            ("/v1/responses", {"input": "Hi"}),
            ("/responses", {"input": "Hi", "stream": True}),
            ("/v1/responses", {"input": "Hi", "background": True}),
            ("/v1/responses", {"input": "Hi", "background": True, "stream": True}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}),
            ("/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50, "stream": True}),
        ]
        for remaining, (path, body) in zip(range(7, -1, -1), bodies, strict=True):
            response = await running.post(path, json.dumps({"model": "gpt-oss", **body}).encode(), **headers)
            assert response.status == 200
            rate_headers = {
                name.lower(): value for name, value in response.headers.items() if name.lower().startswith("x-rate")
            }
            assert rate_headers["x-ratelimit-limit-requests"] == "8"
            assert rate_headers["x-ratelimit-remaining-requests"] == str(remaining)
            assert rate_headers["x-ratelimit-reset-requests"] in ("1m0s", "1m1s", "59s", "58s")
            assert rate_headers["x-ratelimit-limit-tokens"] == "100000"
            assert 90_000 < int(rate_headers["x-ratelimit-remaining-tokens"]) < 100_000
            assert rate_headers["x-ratelimit-reset-tokens"].endswith("s")
        for path, body in bodies:
            refused = await running.post(path, json.dumps({"model": "gpt-oss", **body}).encode(), **headers)
            assert refused.status == 429
            error = refused.body["error"]
            if "messages" in path:
                assert (error["type"], error["details"]["error_code"]) == ("rate_limit_error", "rate_limit_exceeded")
                assert refused.headers["anthropic-ratelimit-requests-remaining"] == "0"
            else:
                assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
            assert 30 < int(refused.headers["retry-after"]) <= 61
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        unlimited = await running.post(
            bodies[0][0], json.dumps({"model": "gpt-oss", **bodies[0][1]}).encode(), **bearing(MASTER)
        )
        assert unlimited.status == 200
        assert not [name for name in unlimited.headers if name.lower().startswith("x-ratelimit")]


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("max_tokens", [2**31, 2**53, 2**62, 2**63 - 1, 2**64 - 1])
@pytest.mark.parametrize("kind", ["redis", "file"])
async def test_a_key_with_a_budget_accepts_any_max_tokens(
    kind: str, max_tokens: int, tmp_path: Path, redis_server: Server
) -> None:
    address = redis_server.url if kind == "redis" else f"sqlite://{tmp_path}/state.db"
    async with (
        FakeVllm(tokens=ANSWER, first_delay_s=0.2) as fake,
        gateway(with_keys(config_of(f"vllm@{fake.url}"), address)) as running,
        ring(address) as keys,
    ):
        for limits in (KeyLimits(money_budget=5_000_000), KeyLimits(token_budget=1_000_000)):
            _, key = await keys.issue(limits=limits)
            # Several in parallel: each request is checked against the reservations of the others.
            body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": max_tokens}
            requests = (
                running.post("/v1/chat/completions", json.dumps(body).encode(), **bearing(key)) for _ in range(3)
            )
            for response in await asyncio.gather(*requests):
                assert response.status == 200, response.body
                assert "unmet" not in response.body["unisono"]


@pytest.mark.slow
async def test_a_parallel_slot_is_freed_when_an_answer_is_aborted(tmp_path: Path) -> None:
    async with (
        FakeVllm(tokens=LONG, delay_s=0.05) as fake,
        keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys),
    ):
        _, key = await keys.issue(limits=KeyLimits(max_parallel=1))
        body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        address = f"{running.url}/v1/chat/completions"
        for _ in range(3):
            async with running.session.post(address, json=body, headers=bearing(key)) as response:
                assert response.status == 200
                await response.content.readany()
                async with running.session.post(address, json=body, headers=bearing(key)) as refused:
                    assert refused.status == 429
                # The client disconnects during the stream.
                response.close()
            async with asyncio.timeout(5):
                while True:
                    async with running.session.post(address, json=body, headers=bearing(key)) as next_response:
                        if next_response.status == 200:
                            next_response.close()
                            break
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.3)


# Budgets


@pytest.mark.sampled(one_in=10)
@pytest.mark.parametrize("money", [False, True], ids=["tokens", "money"])
async def test_a_budget_is_never_exceeded_by_parallel_clients(tmp_path: Path, money: bool) -> None:
    async with (
        FakeVllm(tokens=LONG) as fake,
        keyed(config_with_price(fake.url, input=1.0, output=10.0), tmp_path) as (running, keys),
    ):
        limits = (
            KeyLimits(money_budget=15_000, budget_period=Period("month")) if money else KeyLimits(token_budget=3000)
        )
        record, key = await keys.issue(limits=limits)

        body = json.dumps({"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}).encode()

        async def client() -> int:
            """Return the number of answers before the budget is spent."""
            answers = 0
            while True:
                response = await running.post("/v1/chat/completions", body, **bearing(key))
                if response.status == 429:
                    assert int(response.headers["retry-after"]) >= 1
                    if response.body["error"]["code"] == "rate_limit_exceeded":
                        # Running requests have reserved the rest.
                        await asyncio.sleep(0.02)
                        continue
                    assert response.body["error"]["code"] == "insufficient_quota"
                    return answers
                assert response.status == 200, response.body
                used.append(response.body["usage"])
                message = message_of(response)
                if message.finish_reason == "length":
                    assert "budget" in message.note["unmet"]
                answers += 1

        used: list[Any] = []
        await asyncio.gather(*(client() for _ in range(20)))
        entries = await keys.store.ledger("0000", "9999")
        usages = [entry.used for entry in entries if entry.account.key == record.id]
        spent = sum(usage.cost if money else usage.tokens for usage in usages)
        budget = 15_000 if money else 3000
        assert budget * 0.9 < spent <= budget
        assert sum(usage.tokens for usage in usages) == sum(usage["total_tokens"] for usage in used)


# Background responses


@pytest.mark.parametrize("stream", [False, True], ids=["polled", "streamed"])
@pytest.mark.parametrize("fields", [{"background": True}, {}], ids=["background", "with an idempotency key"])
async def test_a_response_over_the_limit_is_rejected_before_it_is_created(
    tmp_path: Path, fields: dict[str, Any], stream: bool
) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys):
        record, key = await keys.issue(limits=KeyLimits(rpm=1, max_parallel=1))
        body = json.dumps({"model": "gpt-oss", "input": "Hi", "stream": stream, **fields}).encode()
        first = await running.post("/v1/responses", body, **bearing(key), idempotency_key="one")
        assert first.status == 200
        response_id = first.events[0]["response"]["id"] if stream else first.body["id"]
        async with asyncio.timeout(10):
            while (current := await running.get(f"/v1/responses/{response_id}", **bearing(key))).body["status"] in (
                "queued",
                "in_progress",
            ):
                await asyncio.sleep(0.02)
        assert current.body["status"] == "completed"
        # Rejected again under the same idempotency key: the first attempt created nothing.
        for _ in range(2):
            refused = await running.post("/v1/responses", body, **bearing(key), idempotency_key="two")
            assert refused.status == 429
            assert refused.body["error"]["code"] == "rate_limit_exceeded"
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert len([seen for seen in fake.requests if seen.path.endswith("/completions")]) == 1
        entries = [entry for entry in await keys.store.ledger("0000", "9999") if entry.account.key == record.id]
        assert [entry.used.requests for entry in entries] == [1]


async def test_a_reservation_is_released_if_a_response_is_not_stored(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=KeyLimits(max_parallel=1))
        body: dict[str, Any] = {"model": "gpt-oss", "background": True}
        for text, status in (("x " * 900_000, 413), ("Hi", 200)):
            request = json.dumps({**body, "input": text}).encode()
            assert (await running.post("/v1/responses", request, **bearing(key))).status == status
