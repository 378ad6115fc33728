"""No surface reports a usage before it is in the ledger or the spool: a gateway may be killed after any byte."""

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
from unisono.core.access import KeyLimits
from unisono.harmony.encoding import load_encoding
from unisono.store.redis.account_scripts import SETTLE

ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>Hello.<|return|>")
CHAT = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
RESPOND = {"model": "gpt-oss", "input": "Hi"}


class Entering:
    """Sees every command on its way to the store; the first that enters an answer into the ledger gets lost."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def up(self, command: bytes) -> bool:
        # The first call of a script carries its text, later ones its digest.
        if SETTLE.sha.encode() not in command and SETTLE.text.encode() not in command:
            return True
        self.seen.append("entered" if self.seen else "lost")
        return self.seen[-1] == "entered"


def total(usage: Any) -> int:
    return int(usage["total_tokens"])


async def posted(running: Gateway, key: str, path: str, body: dict[str, Any]) -> int:
    """The usage that the answer tells, noticed as soon as it is there."""
    async with running.session.post(running.url + path, json=body, headers=bearing(key)) as answer:
        assert answer.status == 200, await answer.text()
        if not body.get("stream"):
            return total((await answer.json())["usage"])
        async for line in answer.content:
            event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            usage = event.get("usage") or event.get("response", {}).get("usage")
            if usage:
                return total(usage)
    raise AssertionError("no usage")


async def polled(running: Gateway, key: str) -> int:
    body = json.dumps({**RESPOND, "background": True}).encode()
    made = (await running.post("/v1/responses", body, **bearing(key))).body
    async with asyncio.timeout(10):
        while made["status"] in ("queued", "in_progress"):
            assert made["usage"] is None
            await asyncio.sleep(0.01)
            made = (await running.get(f"/v1/responses/{made['id']}", **bearing(key))).body
    return total(made["usage"])


async def socketed(running: Gateway, key: str) -> int:
    async with connected(running, **bearing(key)) as client:
        await client.send()
        while (event := await client.event())["type"] != "response.completed":
            assert not event.get("response", {}).get("usage")
        return total(event["response"]["usage"])


Surface = Callable[[Gateway, str], Awaitable[int]]
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
SURFACES: dict[str, Surface] = {
    "Chat, whole": lambda running, key: posted(running, key, "/v1/chat/completions", CHAT),
    "Chat, streamed": lambda running, key: posted(running, key, "/v1/chat/completions", {**CHAT, **STREAMED}),
    "Responses, whole": lambda running, key: posted(running, key, "/v1/responses", RESPOND),
    "Responses, streamed": lambda running, key: posted(running, key, "/v1/responses", {**RESPOND, "stream": True}),
    "Responses, in the background": polled,
    "Responses, over a WebSocket": socketed,
}


@pytest.mark.parametrize("limits", [KeyLimits(), KeyLimits(rpm=9, token_budget=100_000)], ids=["unlimited", "limited"])
@pytest.mark.parametrize("surface", SURFACES.values(), ids=SURFACES)
async def test_no_usage_is_reported_before_it_is_durable(
    redis_server: Server, tmp_path: Path, surface: Surface, limits: KeyLimits
) -> None:
    entering = Entering()
    with redis_server.client() as client:
        client.flushall()
    async with (
        FakeVllm(tokens=ANSWER) as fake,
        Relay(redis_server.port, cut_up=one_command, up=entering.up) as relay,
        ring(redis_server.url) as keys,
    ):
        config = with_keys(config_of(f"vllm@{fake.url}"), f"redis://127.0.0.1:{relay.port}/0")
        config["store"] |= {"deadline_s": 5.0, "spool_dir": str(tmp_path)}
        async with gateway(config) as running:
            _, key = await keys.issue(limits=limits)
            told = await surface(running, key)
            # The lost write is repeated a moment later; until then the record is on disk.
            spooled = b"".join(path.read_bytes() for path in tmp_path.glob("*.jsonl"))
            assert entering.seen == ["lost", "entered"] or spooled.count(b"\n") == 1
            async with asyncio.timeout(10):
                while entering.seen != ["lost", "entered"]:
                    await asyncio.sleep(0.01)
        [entry] = await keys.store.ledger("0000", "9999")
        assert (entry.used.requests, entry.used.tokens) == (1, told)
