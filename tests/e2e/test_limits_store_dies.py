"""Limits while the Redis that holds them is killed and restarts.

Budgets are never overspent; each gateway counts other limits by itself meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.contract.servers import Server
from tests.e2e.gateway import config_of
from tests.e2e.keyed import Ring, bearing, ring, with_keys
from tests.e2e.replicas import Replica, replica
from tests.fakes import FakeVllm
from unisono.core.access import KeyLimits
from unisono.harmony.encoding import load_encoding

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ENCODING = load_encoding()
ANSWER = ENCODING.encode_marked("<|channel|>final<|message|>" + "la " * 60 + "<|return|>")
CHAT = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi!"}]}
CLIENTS = 50
AGAIN_S = 5.0
"""Well over the second that a gateway takes to go on; the rest is for a busy machine."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One that acknowledges nothing which it could forget."""
    server = Server(tmp_path / "redis", ("appendonly yes", "appendfsync always"))
    try:
        yield server.start()
    finally:
        server.end()


@dataclass
class Pair:
    """Two gateways on one Redis, and their clients."""

    server: Server
    replicas: list[Replica]
    ring: Ring
    session: aiohttp.ClientSession
    refused: int = 0
    """How often somebody was told that the store is down."""

    async def asks(self, number: int, key: str, **fields: Any) -> tuple[int, Any, Any]:
        url = f"{self.replicas[number % 2].url}/v1/chat/completions"
        async with self.session.post(url, json={**CHAT, **fields}, headers=bearing(key)) as answer:
            return answer.status, answer.headers, await answer.json()

    async def decided(self, number: int, key: str, **fields: Any) -> tuple[int, Any, Any]:
        """As `asks`, again and again while the store is down."""
        while True:
            status, headers, body = await self.asks(number, key, **fields)
            if status != 503:
                return status, headers, body
            check_unavailable(headers, body)
            self.refused += 1
            await asyncio.sleep(0.05)

    async def falls(self, down_s: float) -> None:
        """The server is killed, and comes back after so many seconds."""
        self.server.end()
        await asyncio.sleep(down_s)
        await asyncio.to_thread(self.server.start)


def check_unavailable(headers: Any, body: Any) -> None:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["type"], body["error"]["code"]) == ("server_error", "store_unavailable")
    assert int(headers["retry-after"]) >= 1


@asynccontextmanager
async def pair(server: Server, folder: Path, fake: FakeVllm, **settings: Any) -> AsyncIterator[Pair]:
    config = with_keys(config_of(f"vllm@{fake.url}", unisono=settings), server.url)
    async with AsyncExitStack() as stack:
        made = [stack.enter_async_context(replica(folder / f"{n}", config)) for n in range(2)]
        replicas = list(await asyncio.gather(*made))
        keys = await stack.enter_async_context(ring(server.url))
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        yield Pair(server, replicas, keys, session)


LIMITS = {
    "requests": (KeyLimits(rpm=17), 17, 0.05),
    "at once": (KeyLimits(max_parallel=9), 9, 0.0),
    "tokens": (KeyLimits(tpm=1250), 10, 0.1),
    "requests and a budget": (KeyLimits(rpm=17, token_budget=10**9), 17, 0.05),
    "at once and a budget": (KeyLimits(max_parallel=9, token_budget=10**9), 9, 0.0),
}
"""With how many requests may pass, each taken for 101 tokens and allowed to generate 24, and when the server dies."""


async def test_no_more_pass_than_may_while_the_server_dies_among_them(tmp_path: Path, server: Server) -> None:
    # Nothing ends before all have been let in or refused.
    async with (
        FakeVllm(tokens=ANSWER, first_delay_s=6.0) as fake,
        pair(server, tmp_path, fake) as here,
    ):
        for name, (limits, most, until_s) in LIMITS.items():
            _, key = await here.ring.issue(limits=limits)
            bound = most if limits.has_budget else most * len(here.replicas)
            asking = [asyncio.create_task(here.decided(number, key, max_tokens=24)) for number in range(CLIENTS)]
            await asyncio.sleep(until_s)
            await here.falls(0.3)
            answers = await asyncio.gather(*asking)
            counts = Counter(status for status, _, _ in answers)
            # What was held when the server died and nobody heard of is spent, or given back later.
            assert counts[200] <= bound, name
            assert set(counts) <= {200, 429}
            for status, headers, body in answers:
                if status == 429:
                    assert body["error"]["code"] == "rate_limit_exceeded"
                    assert int(headers["retry-after"]) >= 1
        assert here.refused > 0


async def test_a_budget_is_never_overspent_while_the_server_dies_again_and_again(
    tmp_path: Path, server: Server
) -> None:
    budget = 12_000
    async with FakeVllm(tokens=ANSWER, delay_s=0.002) as fake, pair(server, tmp_path, fake) as here:
        record, key = await here.ring.issue(limits=KeyLimits(token_budget=budget))
        told: list[int] = []

        async def client(number: int) -> None:
            while True:
                status, headers, body = await here.decided(number, key)
                if status == 429 and body["error"]["code"] == "rate_limit_exceeded":
                    # Running requests, and those that the outage cut off, have reserved what is left.
                    assert int(headers["retry-after"]) == 1
                    await asyncio.sleep(0.05)
                    continue
                if status == 429:
                    assert body["error"]["code"] == "insufficient_quota"
                    return
                assert status == 200, body
                told.append(body["usage"]["total_tokens"])

        clients = [asyncio.create_task(client(number)) for number in range(8)]
        for enough in (0.1, 0.3, 0.5):
            async with asyncio.timeout(60):
                while sum(told) < enough * budget:
                    await asyncio.sleep(0.01)
            await here.falls(0.4)
        await asyncio.gather(*clients)
        used = [entry.used for entry in await here.ring.store.ledger("0000", "9999") if entry.account.key == record.id]
        spent = sum(one.tokens for one in used)
        assert here.refused > 0
        assert sum(told) <= spent <= budget
        assert spent > 0.9 * budget


async def test_while_the_server_is_down_keys_are_refused_and_soon_after_it_is_back_they_are_not(
    tmp_path: Path, server: Server
) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, pair(server, tmp_path, fake) as here:
        _, key = await here.ring.issue(limits=KeyLimits(rpm=1000, token_budget=10**9))
        for number in range(4):
            assert (await here.asks(number, key))[0] == 200
        server.end()
        # A key is remembered for half a second, and its limits are not.
        for number in range(20):
            status, headers, body = await here.asks(number, key)
            assert status == 503
            check_unavailable(headers, body)
            await asyncio.sleep(0.05)
        await asyncio.to_thread(server.start)
        back = time.monotonic()
        answers = await asyncio.gather(*(here.decided(number, key) for number in range(CLIENTS)))
        assert time.monotonic() - back < AGAIN_S
        assert {status for status, _, _ in answers} == {200}


async def test_keys_that_are_known_pass_while_the_server_is_down_and_are_counted_later(
    tmp_path: Path, server: Server
) -> None:
    async with (
        FakeVllm(tokens=ANSWER) as fake,
        pair(server, tmp_path, fake, when_store_is_down="known_keys") as here,
    ):
        record, key = await here.ring.issue(limits=KeyLimits(rpm=6))
        _, unknown = await here.ring.issue()
        told = [await here.asks(number, key) for number in range(4)]
        server.end()
        told += await asyncio.gather(*(here.asks(number, key) for number in range(20)))
        await asyncio.sleep(0.7)
        told += await asyncio.gather(*(here.asks(number, key) for number in range(20)))
        assert {status for status, _, _ in told} == {200}
        status, headers, body = await here.asks(0, unknown)
        assert status == 503
        check_unavailable(headers, body)
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(10):
            while sum(one.requests for one in await spent(here, record.id)) < len(told):
                await asyncio.sleep(0.05)
        assert sum(one.tokens for one in await spent(here, record.id)) == sum(
            body["usage"]["total_tokens"] for _, _, body in told
        )
        # What ran uncounted is in the ledger; the limit goes on with what it knew.
        later = Counter([(await here.asks(number, key))[0] for number in range(4)])
        assert later == {200: 2, 429: 2}


async def spent(here: Pair, key: str) -> list[Any]:
    return [entry.used for entry in await here.ring.store.ledger("0000", "9999") if entry.account.key == key]
