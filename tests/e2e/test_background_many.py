"""Many concurrent background responses on one process and one Redis leave no leaks."""

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

RESPONSES = 200
BODY: Json = {"model": "gpt-oss", "input": "Count.", "background": True}


async def run_responses(client: Client, model: Model, count: int) -> None:
    created = await asyncio.gather(*(client.post("/v1/responses", BODY) for _ in range(count)))
    ended = await asyncio.gather(*(client.over(response["id"], within_s=60, every_s=1.0) for response in created))
    assert {response["status"] for response in ended} == {"completed"}
    assert {response["output"][-1]["content"][0]["text"] for response in ended} == {model.text}


@pytest.mark.slow
async def test_many_background_responses_leave_no_objects_or_leases(tmp_path: Path) -> None:
    model = Model(words=12)
    server = Server(tmp_path, ("appendonly yes",)).start()
    try:
        async with FakeVllm(script=model.script) as fake:
            config = config_of(f"vllm@{fake.url}", store={"url": server.url, "deadline_s": 10.0})
            async with gateway(config) as running, aiohttp.ClientSession() as session:
                client = Client(running.url, session)
                await run_responses(client, model, RESPONSES)
                before = await idle_object_count(fake)
                await run_responses(client, model, RESPONSES)
                after = await idle_object_count(fake)
                assert after - before < RESPONSES
            with server.client() as redis:
                assert redis.zcard(RUNS) == 0
    finally:
        server.end()


async def idle_object_count(fake: FakeVllm) -> int:
    """Wait until no background task runs and return the number of live objects."""
    fake.requests.clear()
    async with asyncio.timeout(10):
        while any("background response" in task.get_name() for task in asyncio.all_tasks()):
            await asyncio.sleep(0.05)
    gc.collect()
    return len(gc.get_objects())
