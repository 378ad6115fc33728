"""Limits and budgets over real sockets: exact under parallel load, through two processes, with the headers and errors
that clients know."""

from __future__ import annotations

import asyncio
import json
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
from unisono.core.access import KeyLimits, Period
from unisono.harmony.encoding import load_encoding

pytestmark = pytest.mark.timeout(180)

ENCODING = load_encoding()
ANSWER = ENCODING.encode_marked("<|channel|>final<|message|>Hello.<|return|>")
LONG = ENCODING.encode_marked("<|channel|>final<|message|>" + "la " * 60 + "<|return|>")
CLIENTS = 50


def priced(url: str, **price: float) -> dict[str, Any]:
    served = config_of(f"vllm@{url}")
    served["model_list"][0]["unisono"] = {"price": price}
    return served


# -- exactly as many as there is room for


@asynccontextmanager
async def processes(kind: str, folder: Path, redis: Server, url: str) -> AsyncIterator[tuple[list[str], Ring]]:
    """Addresses of gateways: two on one Redis, or one of two workers on a file."""
    address = redis.url if kind == "redis" else f"sqlite://{folder}/state.db"
    config = with_keys(config_of(f"vllm@{url}"), address)
    # What is counted is not how a busy machine keeps a short deadline.
    config["store"]["deadline_s"] = 5.0
    workers = () if kind == "redis" else ("--workers", "2")
    async with AsyncExitStack() as stack:
        count = 2 if kind == "redis" else 1
        made = [stack.enter_async_context(replica(folder / f"{n}", config, *workers)) for n in range(count)]
        replicas = await asyncio.gather(*made)
        yield [one.url for one in replicas], await stack.enter_async_context(ring(address))


LIMITS = {
    "requests": (KeyLimits(rpm=17), 17),
    "at once": (KeyLimits(max_parallel=9), 9),
    "tokens": (KeyLimits(tpm=1250), 10),
}
"""Each request says three bytes, taken for 101 tokens, and may generate 24: 125 tokens are reserved for it."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["redis", "file"])
async def test_of_fifty_clients_at_once_exactly_as_many_pass_as_may(
    kind: str, tmp_path: Path, redis_server: Server
) -> None:
    # Nothing ends before all have been let in or refused.
    async with (
        FakeVllm(tokens=ANSWER, first_delay_s=4.0) as fake,
        processes(kind, tmp_path, redis_server, fake.url) as (urls, keys),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session,
    ):
        for name, (limits, expected) in LIMITS.items():
            _, key = await keys.issue(limits=limits)
            answers = await asyncio.gather(
                *(asked(session, urls[n % len(urls)], key, max_tokens=24) for n in range(CLIENTS))
            )
            counts = Counter(status for status, _, _ in answers)
            assert counts == {200: expected, 429: CLIENTS - expected}, name
            for status, headers, body in answers:
                if status == 429:
                    assert body["error"]["code"] == "rate_limit_exceeded"
                    assert int(headers["retry-after"]) >= 1


async def asked(session: aiohttp.ClientSession, url: str, key: str, **fields: Any) -> tuple[int, Any, Any]:
    body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi!"}], **fields}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=bearing(key)) as answer:
        return answer.status, answer.headers, await answer.json()


# -- headers


async def test_a_client_is_told_what_is_left_on_every_surface(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=KeyLimits(rpm=6, tpm=100_000))
        sent = {**bearing(key)}
        bodies: Sequence[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "stream": True}),
            ("/v1/responses", {"input": "Hi"}),
            ("/responses", {"input": "Hi", "stream": True}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}),
            ("/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50, "stream": True}),
        ]
        for left, (path, body) in zip((5, 4, 3, 2, 1, 0), bodies, strict=True):
            answer = await running.post(path, json.dumps({"model": "gpt-oss", **body}).encode(), **sent)
            assert answer.status == 200
            told = {name.lower(): value for name, value in answer.headers.items() if name.lower().startswith("x-rate")}
            assert told["x-ratelimit-limit-requests"] == "6"
            assert told["x-ratelimit-remaining-requests"] == str(left)
            assert told["x-ratelimit-reset-requests"] in ("1m0s", "1m1s", "59s", "58s")
            assert told["x-ratelimit-limit-tokens"] == "100000"
            assert 90_000 < int(told["x-ratelimit-remaining-tokens"]) < 100_000
            assert told["x-ratelimit-reset-tokens"].endswith("s")
        for path, body in bodies:
            refused = await running.post(path, json.dumps({"model": "gpt-oss", **body}).encode(), **sent)
            assert refused.status == 429
            error = refused.body["error"]
            if "messages" in path:
                assert (error["type"], error["details"]["error_code"]) == ("rate_limit_error", "rate_limit_exceeded")
            else:
                assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
            assert 55 < int(refused.headers["retry-after"]) <= 61
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        unlimited = await running.post(
            bodies[0][0], json.dumps({"model": "gpt-oss", **bodies[0][1]}).encode(), **bearing(MASTER)
        )
        assert unlimited.status == 200
        assert not [name for name in unlimited.headers if name.lower().startswith("x-ratelimit")]


@pytest.mark.parametrize("most", [2**31, 2**53, 2**62, 2**63 - 1, 2**64 - 1])
@pytest.mark.parametrize("kind", ["redis", "file"])
async def test_an_answer_of_any_length_may_be_asked_for_by_a_key_with_a_budget(
    kind: str, most: int, tmp_path: Path, redis_server: Server
) -> None:
    address = redis_server.url if kind == "redis" else f"sqlite://{tmp_path}/state.db"
    async with (
        FakeVllm(tokens=ANSWER, first_delay_s=0.2) as fake,
        gateway(with_keys(config_of(f"vllm@{fake.url}"), address)) as running,
        ring(address) as keys,
    ):
        for limits in (KeyLimits(money_budget=5_000_000), KeyLimits(token_budget=1_000_000)):
            _, key = await keys.issue(limits=limits)
            # Several beside one another: each looks at what the others hold.
            body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": most}
            sent = (running.post("/v1/chat/completions", json.dumps(body).encode(), **bearing(key)) for _ in range(3))
            for answer in await asyncio.gather(*sent):
                assert answer.status == 200, answer.body
                assert "unmet" not in answer.body["unisono"]


@pytest.mark.slow
async def test_a_place_is_free_again_when_an_answer_ends_however_it_does(tmp_path: Path) -> None:
    async with (
        FakeVllm(tokens=LONG, delay_s=0.05) as fake,
        keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys),
    ):
        _, key = await keys.issue(limits=KeyLimits(max_parallel=1))
        body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        address = f"{running.url}/v1/chat/completions"
        for _ in range(3):
            async with running.session.post(address, json=body, headers=bearing(key)) as answer:
                assert answer.status == 200
                await answer.content.readany()
                async with running.session.post(address, json=body, headers=bearing(key)) as refused:
                    assert refused.status == 429
                # The client leaves in the middle.
                answer.close()
            async with asyncio.timeout(5):
                while True:
                    async with running.session.post(address, json=body, headers=bearing(key)) as next_one:
                        if next_one.status == 200:
                            next_one.close()
                            break
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.3)


# -- budgets


@pytest.mark.parametrize("money", [False, True], ids=["tokens", "money"])
async def test_a_budget_stops_spending_at_its_edge_whoever_spends(tmp_path: Path, money: bool) -> None:
    async with (
        FakeVllm(tokens=LONG) as fake,
        keyed(priced(fake.url, input=1.0, output=10.0), tmp_path) as (running, keys),
    ):
        limits = (
            KeyLimits(money_budget=15_000, budget_period=Period("month")) if money else KeyLimits(token_budget=3000)
        )
        record, key = await keys.issue(limits=limits)

        body = json.dumps({"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}).encode()

        async def client() -> int:
            """How many answers it got before the budget was spent."""
            told = 0
            while True:
                answer = await running.post("/v1/chat/completions", body, **bearing(key))
                if answer.status == 429:
                    assert int(answer.headers["retry-after"]) >= 1
                    if answer.body["error"]["code"] == "rate_limit_exceeded":
                        # Running requests have reserved the rest.
                        await asyncio.sleep(0.02)
                        continue
                    assert answer.body["error"]["code"] == "insufficient_quota"
                    return told
                assert answer.status == 200, answer.body
                used.append(answer.body["usage"])
                message = message_of(answer)
                if message.finish_reason == "length":
                    assert "budget" in message.note["unmet"]
                told += 1

        used: list[Any] = []
        await asyncio.gather(*(client() for _ in range(20)))
        entries = await keys.store.ledger("0000", "9999")
        mine = [entry.used for entry in entries if entry.account.key == record.id]
        spent = sum(one.cost if money else one.tokens for one in mine)
        budget = 15_000 if money else 3000
        assert budget * 0.9 < spent <= budget
        assert sum(one.tokens for one in mine) == sum(one["total_tokens"] for one in used)


# -- in the background


@pytest.mark.parametrize("stream", [False, True], ids=["polled", "streamed"])
@pytest.mark.parametrize("held", [{"background": True}, {}], ids=["background", "with a key of its own"])
async def test_a_response_over_the_limit_is_refused_before_it_is_promised(
    tmp_path: Path, held: dict[str, Any], stream: bool
) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys):
        record, key = await keys.issue(limits=KeyLimits(rpm=1, max_parallel=1))
        body = json.dumps({"model": "gpt-oss", "input": "Hi", "stream": stream, **held}).encode()
        first = await running.post("/v1/responses", body, **bearing(key), idempotency_key="one")
        assert first.status == 200
        response_id = first.events[0]["response"]["id"] if stream else first.body["id"]
        async with asyncio.timeout(10):
            while (got := await running.get(f"/v1/responses/{response_id}", **bearing(key))).body["status"] in (
                "queued",
                "in_progress",
            ):
                await asyncio.sleep(0.02)
        assert got.body["status"] == "completed"
        # Refused again under the same key: nothing came of the first try.
        for _ in range(2):
            refused = await running.post("/v1/responses", body, **bearing(key), idempotency_key="two")
            assert refused.status == 429
            assert refused.body["error"]["code"] == "rate_limit_exceeded"
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert len([seen for seen in fake.requests if seen.path.endswith("/completions")]) == 1
        entries = [entry for entry in await keys.store.ledger("0000", "9999") if entry.account.key == record.id]
        assert [entry.used.requests for entry in entries] == [1]


async def test_what_a_response_that_is_never_kept_was_let_in_with_is_given_back(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, keyed(config_of(f"vllm@{fake.url}"), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=KeyLimits(max_parallel=1))
        body: dict[str, Any] = {"model": "gpt-oss", "background": True}
        for said, status in (("x " * 900_000, 413), ("Hi", 200)):
            sent = json.dumps({**body, "input": said}).encode()
            assert (await running.post("/v1/responses", sent, **bearing(key))).status == status
