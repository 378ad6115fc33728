"""Many background responses at once on one process and one Redis: all come to their end, and nothing of them stays."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import aiohttp
import pytest

from tests.contract.servers import Server
from tests.e2e.continuing import Model
from tests.e2e.gateway import config_of, gateway
from tests.e2e.replicas import Client, Json
from tests.fakes import FakeVllm
from unisono.store.redis.keys import RUNS

MANY = 200
BODY: Json = {"model": "gpt-oss", "input": "Count.", "background": True}


async def begin_and_end(client: Client, model: Model, count: int) -> None:
    made = await asyncio.gather(*(client.post("/v1/responses", BODY) for _ in range(count)))
    kept = await asyncio.gather(*(client.over(response["id"], within_s=60, every_s=1.0) for response in made))
    assert {response["status"] for response in kept} == {"completed"}
    assert {response["output"][-1]["content"][0]["text"] for response in kept} == {model.text}


@pytest.mark.slow
async def test_many_at_once_leave_nothing_behind(tmp_path: Path) -> None:
    model = Model(words=12)
    server = Server(tmp_path, ("appendonly yes",)).start()
    try:
        async with FakeVllm(script=model.script) as fake:
            config = config_of(f"vllm@{fake.url}", store={"url": server.url, "deadline_s": 10.0})
            async with gateway(config) as here, aiohttp.ClientSession() as session:
                client = Client(here.url, session)
                await begin_and_end(client, model, MANY)
                before = await at_rest(fake)
                await begin_and_end(client, model, MANY)
                after = await at_rest(fake)
                assert after - before < MANY
            with server.client() as redis:
                assert redis.zcard(RUNS) == 0
    finally:
        server.end()


async def at_rest(fake: FakeVllm) -> int:
    """How many objects there are when nothing of a response goes on any more."""
    fake.requests.clear()
    async with asyncio.timeout(10):
        while any("background response" in task.get_name() for task in asyncio.all_tasks()):
            await asyncio.sleep(0.05)
    gc.collect()
    return len(gc.get_objects())
