"""The ledger is what clients were told, however often gateways are killed: nothing that a client saw is missing, and
nothing is there twice."""

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
from unisono.core.access import KeyLimits
from unisono.harmony.encoding import load_encoding

pytestmark = pytest.mark.timeout(180)

LONG = load_encoding().encode_marked("<|channel|>final<|message|>" + "la " * 40 + "<|return|>")
CHAT = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
RESPOND = {"model": "gpt-oss", "input": "Hi"}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, **STREAMED}),
    ("/v1/responses", RESPOND),
    ("/v1/responses", {**RESPOND, "stream": True}),
)
CLIENTS = 12
KILLS = 4


@dataclass
class Heard:
    """What clients were told, in tokens, and how many of their requests may have been entered without a word."""

    told: list[int] = field(default_factory=list)
    unheard: int = 0
    background: set[str] = field(default_factory=set)
    """Responses that were promised, and go on without their client."""
    over: bool = False


@dataclass
class Crowd:
    """Clients that ask one of the replicas, and another one where that is gone."""

    replicas: list[Replica]
    session: aiohttp.ClientSession
    headers: dict[str, str]
    heard: Heard = field(default_factory=Heard)

    async def client(self, number: int) -> None:
        path, body = ASKED[number % len(ASKED)]
        turn = number
        while not self.heard.over:
            turn += 1
            await self._asked(turn, self._answered, path, body)

    async def in_background(self, number: int) -> None:
        turn = number
        while not self.heard.over:
            turn += 1
            await self._asked(turn, self._promised, "/v1/responses", {**RESPOND, "background": True})
            await asyncio.sleep(0.1)

    async def _asked(self, turn: int, read: Any, path: str, body: dict[str, Any]) -> None:
        url = self.replicas[turn % len(self.replicas)].url
        try:
            async with self.session.post(url + path, json=body, headers=self.headers) as answer:
                assert answer.status in (200, 503), await answer.text()
                if answer.status == 200:
                    await read(answer)
                else:
                    self.heard.unheard += 1
        except aiohttp.ClientConnectorError:
            # Nobody was there.
            await asyncio.sleep(0.05)
        except aiohttp.ClientError:
            self.heard.unheard += 1

    async def _answered(self, answer: aiohttp.ClientResponse) -> None:
        if answer.content_type == "application/json":
            self.heard.told.append((await answer.json())["usage"]["total_tokens"])
            return
        async for line in answer.content:
            event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            if usage := event.get("usage") or event.get("response", {}).get("usage"):
                self.heard.told.append(usage["total_tokens"])
                return
        raise aiohttp.ClientPayloadError("no usage")

    async def _promised(self, answer: aiohttp.ClientResponse) -> None:
        self.heard.background.add((await answer.json())["id"])

    async def settled(self) -> None:
        """Hear what became of everything in the background."""
        for response in self.heard.background:
            url = f"{self.replicas[0].url}/v1/responses/{response}"
            async with asyncio.timeout(60):
                while True:
                    async with self.session.get(url, headers=self.headers) as answer:
                        now = await answer.json()
                    if now["status"] not in ("queued", "in_progress"):
                        break
                    await asyncio.sleep(0.05)
            assert now["status"] == "completed", now
            self.heard.told.append(now["usage"]["total_tokens"])


@pytest.mark.slow
async def test_what_clients_were_told_is_in_the_ledger_once_however_often_gateways_are_killed(
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
            both = [first, second]
            crowd = Crowd(both, session, bearing(key))
            heard = crowd.heard
            asking = [asyncio.create_task(crowd.client(number)) for number in range(CLIENTS)]
            asking += [asyncio.create_task(crowd.in_background(number)) for number in range(2)]
            for number in range(KILLS):
                before = len(heard.told)
                async with asyncio.timeout(30):
                    while len(heard.told) < before + 3 * CLIENTS:
                        await asyncio.sleep(0.01)
                await asyncio.sleep(0.037 * number)
                both[number % 2].kill()
                await both[number % 2].end()
                await both[number % 2].start()
            heard.over = True
            await asyncio.gather(*asking)
            await crowd.settled()
            assert heard.unheard > 0
            usage = f"{second.url}/v1/usage"
            async with session.get(usage, headers=bearing(key)) as answer:
                [line] = (await answer.json())["data"]
        # Those that were on their way when a gateway was killed may have been entered and never been heard of.
        told, most = len(heard.told), max(heard.told)
        assert told <= line["requests"] <= told + heard.unheard
        assert sum(heard.told) <= line["total_tokens"] <= sum(heard.told) + heard.unheard * most
        [shown] = await shown_by_the_command(tmp_path / "0" / "config.json")
        assert shown["key"] == record.id
        assert {name: shown[name] for name in line if name in shown} == {
            name: line[name] for name in line if name in shown
        }


async def shown_by_the_command(config: Path) -> list[dict[str, Any]]:
    asked = ["usage", "--config", str(config), "--json"]
    result = await asyncio.to_thread(CliRunner().invoke, main, asked)
    assert result.exit_code == 0, result.output
    shown: list[dict[str, Any]] = json.loads(result.stdout)
    return shown
