"""Limits while the Redis that holds them is killed and restarts.

Budgets are never exceeded; each gateway counts the other limits locally meanwhile.
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
from unisono.core.quotas import KeyLimits
from unisono.harmony.encoding import load_encoding

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ENCODING = load_encoding()
ANSWER = ENCODING.encode_marked("<|channel|>final<|message|>" + "la " * 60 + "<|return|>")
CHAT = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi!"}]}
CLIENTS = 50
# Well over the second that a gateway takes to reconnect; the rest is for a busy machine.
RECONNECT_LIMIT_S = 5.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A Redis that acknowledges only durable writes."""
    server = Server(tmp_path / "redis", ("appendonly yes", "appendfsync always"))
    try:
        yield server.start()
    finally:
        server.end()


@dataclass
class GatewayPair:
    """Two gateways on one Redis, and their clients."""

    server: Server
    replicas: list[Replica]
    ring: Ring
    session: aiohttp.ClientSession
    # Number of responses that reported the store as unavailable.
    unavailable_count: int = 0

    async def chat(self, number: int, key: str, **fields: Any) -> tuple[int, Any, Any]:
        url = f"{self.replicas[number % 2].url}/v1/chat/completions"
        async with self.session.post(url, json={**CHAT, **fields}, headers=bearing(key)) as response:
            return response.status, response.headers, await response.json()

    async def chat_until_available(self, number: int, key: str, **fields: Any) -> tuple[int, Any, Any]:
        """Send a request, and repeat it while the store is down."""
        while True:
            status, headers, body = await self.chat(number, key, **fields)
            if status != 503:
                return status, headers, body
            check_unavailable(headers, body)
            self.unavailable_count += 1
            await asyncio.sleep(0.05)

    async def crash(self, down_s: float) -> None:
        """Kill the server and restart it after `down_s` seconds."""
        self.server.end()
        await asyncio.sleep(down_s)
        await asyncio.to_thread(self.server.start)


def check_unavailable(headers: Any, body: Any) -> None:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["type"], body["error"]["code"]) == ("server_error", "store_unavailable")
    assert int(headers["retry-after"]) >= 1


@asynccontextmanager
async def pair(server: Server, folder: Path, fake: FakeVllm, **settings: Any) -> AsyncIterator[GatewayPair]:
    config = with_keys(config_of(f"vllm@{fake.url}", unisono=settings), server.url)
    async with AsyncExitStack() as stack:
        starting = [stack.enter_async_context(replica(folder / f"{n}", config)) for n in range(2)]
        replicas = list(await asyncio.gather(*starting))
        keys = await stack.enter_async_context(ring(server.url))
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        yield GatewayPair(server, replicas, keys, session)


# Limits, requests that may pass, and the delay before the server dies. A request reserves 101 tokens for the prompt
# and 24 for the answer.
LIMITS = {
    "requests": (KeyLimits(rpm=17), 17, 0.05),
    "parallel requests": (KeyLimits(max_parallel=9), 9, 0.0),
    "tokens": (KeyLimits(tpm=1250), 10, 0.1),
    "requests and a budget": (KeyLimits(rpm=17, token_budget=10**9), 17, 0.05),
    "parallel requests and a budget": (KeyLimits(max_parallel=9, token_budget=10**9), 9, 0.0),
}


async def test_limits_hold_while_the_store_dies_during_requests(tmp_path: Path, server: Server) -> None:
    # No answer ends before all requests are accepted or rejected.
    async with (
        FakeVllm(tokens=ANSWER, first_delay_s=6.0) as fake,
        pair(server, tmp_path, fake) as gateways,
    ):
        for name, (limits, limit, delay_s) in LIMITS.items():
            _, key = await gateways.ring.issue(limits=limits)
            bound = limit if limits.has_budget else limit * len(gateways.replicas)
            tasks = [
                asyncio.create_task(gateways.chat_until_available(number, key, max_tokens=24))
                for number in range(CLIENTS)
            ]
            await asyncio.sleep(delay_s)
            await gateways.crash(0.3)
            responses = await asyncio.gather(*tasks)
            counts = Counter(status for status, _, _ in responses)
            # Reservations made when the server died are spent, or returned later.
            assert counts[200] <= bound, name
            assert set(counts) <= {200, 429}
            for status, headers, body in responses:
                if status == 429:
                    assert body["error"]["code"] == "rate_limit_exceeded"
                    assert int(headers["retry-after"]) >= 1
        assert gateways.unavailable_count > 0


async def test_a_budget_is_never_exceeded_while_the_store_dies_repeatedly(tmp_path: Path, server: Server) -> None:
    budget = 12_000
    async with FakeVllm(tokens=ANSWER, delay_s=0.002) as fake, pair(server, tmp_path, fake) as gateways:
        record, key = await gateways.ring.issue(limits=KeyLimits(token_budget=budget))
        reported: list[int] = []

        async def client(number: int) -> None:
            while True:
                status, headers, body = await gateways.chat_until_available(number, key)
                if status == 429 and body["error"]["code"] == "rate_limit_exceeded":
                    # Running requests, and those cut off by the outage, have reserved the rest.
                    assert int(headers["retry-after"]) == 1
                    await asyncio.sleep(0.05)
                    continue
                if status == 429:
                    assert body["error"]["code"] == "insufficient_quota"
                    return
                assert status == 200, body
                reported.append(body["usage"]["total_tokens"])

        clients = [asyncio.create_task(client(number)) for number in range(8)]
        for fraction in (0.1, 0.3, 0.5):
            async with asyncio.timeout(60):
                while sum(reported) < fraction * budget:
                    await asyncio.sleep(0.01)
            await gateways.crash(0.4)
        await asyncio.gather(*clients)
        used = [
            entry.used for entry in await gateways.ring.store.ledger("0000", "9999") if entry.account.key == record.id
        ]
        spent_tokens = sum(usage.tokens for usage in used)
        assert gateways.unavailable_count > 0
        assert sum(reported) <= spent_tokens <= budget
        assert spent_tokens > 0.9 * budget


async def test_keys_are_rejected_while_the_store_is_down_and_soon_accepted_again(
    tmp_path: Path, server: Server
) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, pair(server, tmp_path, fake) as gateways:
        _, key = await gateways.ring.issue(limits=KeyLimits(rpm=1000, token_budget=10**9))
        for number in range(4):
            assert (await gateways.chat(number, key))[0] == 200
        server.end()
        # A key is cached for half a second, its limits are not.
        for number in range(20):
            status, headers, body = await gateways.chat(number, key)
            assert status == 503
            check_unavailable(headers, body)
            await asyncio.sleep(0.05)
        await asyncio.to_thread(server.start)
        restarted_at = time.monotonic()
        responses = await asyncio.gather(*(gateways.chat_until_available(number, key) for number in range(CLIENTS)))
        assert time.monotonic() - restarted_at < RECONNECT_LIMIT_S
        assert {status for status, _, _ in responses} == {200}


async def test_known_keys_pass_while_the_store_is_down_and_are_counted_later(tmp_path: Path, server: Server) -> None:
    async with (
        FakeVllm(tokens=ANSWER) as fake,
        pair(server, tmp_path, fake, when_store_is_down="known_keys") as gateways,
    ):
        record, key = await gateways.ring.issue(limits=KeyLimits(rpm=6))
        _, unknown = await gateways.ring.issue()
        responses = [await gateways.chat(number, key) for number in range(4)]
        server.end()
        responses += await asyncio.gather(*(gateways.chat(number, key) for number in range(20)))
        await asyncio.sleep(0.7)
        responses += await asyncio.gather(*(gateways.chat(number, key) for number in range(20)))
        assert {status for status, _, _ in responses} == {200}
        status, headers, body = await gateways.chat(0, unknown)
        assert status == 503
        check_unavailable(headers, body)
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(10):
            while sum(usage.requests for usage in await usages_of(gateways, record.id)) < len(responses):
                await asyncio.sleep(0.05)
        assert sum(usage.tokens for usage in await usages_of(gateways, record.id)) == sum(
            body["usage"]["total_tokens"] for _, _, body in responses
        )
        # Requests of the outage are in the ledger; the limit continues from its last count.
        statuses = Counter([(await gateways.chat(number, key))[0] for number in range(4)])
        assert statuses == {200: 2, 429: 2}


async def usages_of(gateways: GatewayPair, key: str) -> list[Any]:
    return [entry.used for entry in await gateways.ring.store.ledger("0000", "9999") if entry.account.key == key]
