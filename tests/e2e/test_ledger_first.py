"""No API reports usage before it is in the ledger or the spool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract.servers import Server
from tests.e2e.gateway import Gateway, config_of, gateway
from tests.e2e.keyed import bearing, ring, with_keys
from tests.e2e.replicas import Relay, one_command
from tests.e2e.test_responses_websocket import connected
from tests.fakes import FakeVllm
from unisono.core.quotas import KeyLimits
from unisono.harmony.encoding import load_encoding
from unisono.store.redis.account_scripts import SETTLE

ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>Hello.<|return|>")
CHAT = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
RESPOND = {"model": "gpt-oss", "input": "Hi"}


class SettlementWatcher:
    """Watch the commands to the store; drop the first one that settles usage."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def forward(self, command: bytes) -> bool:
        # The first call of a script carries its text, later ones its digest.
        if SETTLE.sha.encode() not in command and SETTLE.text.encode() not in command:
            return True
        self.outcomes.append("entered" if self.outcomes else "lost")
        return self.outcomes[-1] == "entered"


def total(usage: Any) -> int:
    return int(usage["total_tokens"])


async def post(running: Gateway, key: str, path: str, body: dict[str, Any]) -> int:
    """Post a request and return its reported total tokens as soon as they arrive."""
    async with running.session.post(running.url + path, json=body, headers=bearing(key)) as response:
        assert response.status == 200, await response.text()
        if not body.get("stream"):
            return total((await response.json())["usage"])
        async for line in response.content:
            event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            usage = event.get("usage") or event.get("response", {}).get("usage")
            if usage:
                return total(usage)
    raise AssertionError("no usage")


async def poll_background(running: Gateway, key: str) -> int:
    body = json.dumps({**RESPOND, "background": True}).encode()
    response = (await running.post("/v1/responses", body, **bearing(key))).body
    async with asyncio.timeout(10):
        while response["status"] in ("queued", "in_progress"):
            assert response["usage"] is None
            await asyncio.sleep(0.01)
            response = (await running.get(f"/v1/responses/{response['id']}", **bearing(key))).body
    return total(response["usage"])


async def over_websocket(running: Gateway, key: str) -> int:
    async with connected(running, **bearing(key)) as client:
        await client.send()
        while (event := await client.event())["type"] != "response.completed":
            assert not event.get("response", {}).get("usage")
        return total(event["response"]["usage"])


Surface = Callable[[Gateway, str], Awaitable[int]]
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
SURFACES: dict[str, Surface] = {
    "Chat, whole": lambda running, key: post(running, key, "/v1/chat/completions", CHAT),
    "Chat, streamed": lambda running, key: post(running, key, "/v1/chat/completions", {**CHAT, **STREAMED}),
    "Responses, whole": lambda running, key: post(running, key, "/v1/responses", RESPOND),
    "Responses, streamed": lambda running, key: post(running, key, "/v1/responses", {**RESPOND, "stream": True}),
    "Responses, in background": poll_background,
    "Responses, over WebSocket": over_websocket,
}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("limits", [KeyLimits(), KeyLimits(rpm=9, token_budget=100_000)], ids=["unlimited", "limited"])
@pytest.mark.parametrize("surface", SURFACES.values(), ids=SURFACES)
async def test_no_usage_is_reported_before_it_is_durable(
    redis_server: Server, tmp_path: Path, surface: Surface, limits: KeyLimits
) -> None:
    watcher = SettlementWatcher()
    with redis_server.client() as client:
        client.flushall()
    async with (
        FakeVllm(tokens=ANSWER) as fake,
        Relay(redis_server.port, cut_up=one_command, up=watcher.forward) as relay,
        ring(redis_server.url) as keys,
    ):
        config = with_keys(config_of(f"vllm@{fake.url}"), f"redis://127.0.0.1:{relay.port}/0")
        config["store"] |= {"deadline_s": 5.0, "spool_dir": str(tmp_path)}
        async with gateway(config) as running:
            _, key = await keys.issue(limits=limits)
            reported = await surface(running, key)
            # The dropped write is retried soon; until then the record is on disk.
            spooled = b"".join(path.read_bytes() for path in tmp_path.glob("*.jsonl"))
            assert watcher.outcomes == ["lost", "entered"] or spooled.count(b"\n") == 1
            async with asyncio.timeout(10):
                while watcher.outcomes != ["lost", "entered"]:
                    await asyncio.sleep(0.01)
        [entry] = await keys.store.ledger("0000", "9999")
        assert (entry.used.requests, entry.used.tokens) == (1, reported)
