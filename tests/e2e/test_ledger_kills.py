"""The ledger matches the usage reported to clients, even if gateways are killed repeatedly.

No reported usage is missing, and none is recorded twice.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from tests.contract.servers import Server
from tests.e2e.gateway import config_of
from tests.e2e.keyed import bearing, ring, with_keys
from tests.e2e.replicas import Replica, replica
from tests.fakes import FakeVllm
from unisono.cli import main
from unisono.core.quotas import KeyLimits
from unisono.harmony.encoding import load_encoding

pytestmark = pytest.mark.timeout(180)

LONG = load_encoding().encode_marked("<|channel|>final<|message|>" + "la " * 40 + "<|return|>")
CHAT = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
RESPOND = {"model": "gpt-oss", "input": "Hi"}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, **STREAMED}),
    ("/v1/responses", RESPOND),
    ("/v1/responses", {**RESPOND, "stream": True}),
)
CLIENTS = 12
KILLS = 4


@dataclass
class Observed:
    """Total tokens reported to clients, and the number of requests with an unknown outcome."""

    reported: list[int] = field(default_factory=list)
    unknown: int = 0
    # Ids of accepted background responses, which continue without their client.
    background: set[str] = field(default_factory=set)
    is_over: bool = False


@dataclass
class Clients:
    """Clients that send requests to one of the replicas, and to the other one if it is down."""

    replicas: list[Replica]
    session: aiohttp.ClientSession
    headers: dict[str, str]
    observed: Observed = field(default_factory=Observed)

    async def run(self, number: int) -> None:
        path, body = REQUESTS[number % len(REQUESTS)]
        turn = number
        while not self.observed.is_over:
            turn += 1
            await self._send(turn, self._read_usage, path, body)

    async def run_background(self, number: int) -> None:
        turn = number
        while not self.observed.is_over:
            turn += 1
            await self._send(turn, self._read_id, "/v1/responses", {**RESPOND, "background": True})
            await asyncio.sleep(0.1)

    async def _send(self, turn: int, read: Any, path: str, body: dict[str, Any]) -> None:
        url = self.replicas[turn % len(self.replicas)].url
        try:
            async with self.session.post(url + path, json=body, headers=self.headers) as response:
                assert response.status in (200, 503), await response.text()
                if response.status == 200:
                    await read(response)
                else:
                    self.observed.unknown += 1
        except aiohttp.ClientConnectorError:
            # The replica is down.
            await asyncio.sleep(0.05)
        except aiohttp.ClientError:
            self.observed.unknown += 1

    async def _read_usage(self, response: aiohttp.ClientResponse) -> None:
        if response.content_type == "application/json":
            self.observed.reported.append((await response.json())["usage"]["total_tokens"])
            return
        async for line in response.content:
            event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            if usage := event.get("usage") or event.get("response", {}).get("usage"):
                self.observed.reported.append(usage["total_tokens"])
                return
        raise aiohttp.ClientPayloadError("no usage")

    async def _read_id(self, response: aiohttp.ClientResponse) -> None:
        self.observed.background.add((await response.json())["id"])

    async def collect_background(self) -> None:
        """Wait for every background response and record its usage."""
        for response_id in self.observed.background:
            url = f"{self.replicas[0].url}/v1/responses/{response_id}"
            async with asyncio.timeout(60):
                while True:
                    async with self.session.get(url, headers=self.headers) as response:
                        response_body = await response.json()
                    if response_body["status"] not in ("queued", "in_progress"):
                        break
                    await asyncio.sleep(0.05)
            assert response_body["status"] == "completed", response_body
            self.observed.reported.append(response_body["usage"]["total_tokens"])


@pytest.mark.slow
async def test_reported_usage_is_in_the_ledger_once_although_gateways_are_killed(
    tmp_path: Path, redis_server: Server
) -> None:
    with redis_server.client() as client:
        client.flushall()
    async with FakeVllm(tokens=LONG, delay_s=0.002) as fake, ring(redis_server.url) as keys:
        config = with_keys(config_of(f"vllm@{fake.url}"), redis_server.url)
        config["store"] |= {"deadline_s": 5.0, "lease_s": 1.0}
        record, key = await keys.issue("ann", KeyLimits(rpm=1_000_000, token_budget=10**12))
        async with (
            replica(tmp_path / "0", config) as first,
            replica(tmp_path / "1", config) as second,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session,
        ):
            replicas = [first, second]
            clients = Clients(replicas, session, bearing(key))
            observed = clients.observed
            tasks = [asyncio.create_task(clients.run(number)) for number in range(CLIENTS)]
            tasks += [asyncio.create_task(clients.run_background(number)) for number in range(2)]
            for number in range(KILLS):
                before = len(observed.reported)
                async with asyncio.timeout(30):
                    while len(observed.reported) < before + 3 * CLIENTS:
                        await asyncio.sleep(0.01)
                await asyncio.sleep(0.037 * number)
                replicas[number % 2].kill()
                await replicas[number % 2].end()
                await replicas[number % 2].start()
            observed.is_over = True
            await asyncio.gather(*tasks)
            await clients.collect_background()
            assert observed.unknown > 0
            usage = f"{second.url}/v1/usage"
            async with session.get(usage, headers=bearing(key)) as response:
                [usage_line] = (await response.json())["data"]
        # Requests that were running when a gateway was killed may be in the ledger without a reported usage.
        reported, max_tokens = len(observed.reported), max(observed.reported)
        assert reported <= usage_line["requests"] <= reported + observed.unknown
        assert (
            sum(observed.reported)
            <= usage_line["total_tokens"]
            <= sum(observed.reported) + observed.unknown * max_tokens
        )
        [entry] = await usage_of_command(tmp_path / "0" / "config.json")
        assert entry["key"] == record.id
        assert {name: entry[name] for name in usage_line if name in entry} == {
            name: usage_line[name] for name in usage_line if name in entry
        }


async def usage_of_command(config: Path) -> list[dict[str, Any]]:
    arguments = ["usage", "--config", str(config), "--json"]
    result = await asyncio.to_thread(CliRunner().invoke, main, arguments)
    assert result.exit_code == 0, result.output
    entries: list[dict[str, Any]] = json.loads(result.stdout)
    return entries
