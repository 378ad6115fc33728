"""A takeover of a background response charges the earlier process's tokens exactly once."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from tests.contract.servers import Server
from tests.e2e.continuing import Model
from tests.e2e.gateway import config_of
from tests.e2e.keyed import bearing, ring, with_keys
from tests.e2e.replicas import LEASE_S, replica
from tests.fakes import FakeVllm, VllmScript, stall_at
from unisono.api.responses.background.job_record import LEFT_SINCE
from unisono.core.quotas import SHARED_TENANT, KeyLimits, TokenUsage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

RESPOND = {"model": "gpt-oss", "input": "Hi", "background": True}
STALLED_AFTER = 20


@pytest.mark.parametrize("kind", ["redis", "sqlite"])
@pytest.mark.parametrize("stop_signal", ["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("final_status", ["completed", "cancelled", "failed"])
async def test_tokens_of_all_owners_are_charged_once(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, stop_signal: str, final_status: str
) -> None:
    address = f"sqlite://{tmp_path}/state.db"
    if kind == "redis":
        server: Server = request.getfixturevalue("redis_server")
        with server.client() as client:
            client.flushall()
        address = server.url
    model = Model()
    async with FakeVllm() as fake, ring(address) as keys, AsyncExitStack() as stack:
        fake.script = lambda _: VllmScript(tokens=model.answer, faults=(stall_at(STALLED_AFTER),))
        config = with_keys(config_of(f"vllm@{fake.url}", litellm_settings={"max_budget": 1_000}), address)
        config["model_list"][0]["unisono"] = {"price": {"output": 1}}
        config["store"] |= {"lease_s": LEASE_S}
        record, key = await keys.issue("ann", KeyLimits(token_budget=10**6))
        session = await stack.enter_async_context(aiohttp.ClientSession(headers=bearing(key)))
        first = await stack.enter_async_context(replica(tmp_path / "a", config))
        async with session.post(f"{first.url}/v1/responses", json=RESPOND) as response:
            response_id = (await response.json())["id"]
        async with asyncio.timeout(20):
            while len(await keys.store.tokens("ann", response_id)) < STALLED_AFTER // 2:
                await asyncio.sleep(0.02)
        first.signal(signal.Signals[stop_signal])
        await first.ended()
        journal_tokens = len(await keys.store.tokens("ann", response_id))
        if final_status == "completed":
            fake.script = model.script
        elif final_status == "failed":
            config = with_keys(config_of(f"vllm@{fake.url}", name="another-gpt-oss"), address)
            config["store"] |= {"lease_s": LEASE_S}
            await asyncio.sleep(2 * LEASE_S)
            # The response has been left to other processes for too long.
            [stored] = await keys.store.responses("ann", [response_id])
            assert stored is not None
            await keys.store.update("ann", replace(stored, notes={**stored.notes, LEFT_SINCE: 0.0}))
        else:
            model.waits, fake.script = True, model.script
        second = await stack.enter_async_context(replica(tmp_path / "b", config))
        url = f"{second.url}/v1/responses/{response_id}"
        if final_status == "cancelled":
            async with asyncio.timeout(20):
                while len(fake.requests) < 2:
                    await asyncio.sleep(0.02)
            async with session.post(f"{url}/cancel", json={}) as response:
                assert response.status == 200
        async with asyncio.timeout(30):
            while (response_body := await (await session.get(url)).json())["status"] in ("queued", "in_progress"):
                await asyncio.sleep(0.05)
        assert response_body["status"] == final_status
        # Waiting settlements are written before the process ends.
        second.signal(signal.SIGTERM)
        assert await second.ended() == 0
        lines = await keys.store.ledger("0000", "9999")
        used = sum((line.used for line in lines if line.account.key == record.id), TokenUsage())
        shared = sum((line.used for line in lines if line.account.tenant == SHARED_TENANT), TokenUsage())
        # The configuration of the second process in a failure has no budget.
        if final_status != "failed":
            assert shared == used
        assert used.requests == 1
        if final_status == "completed":
            assert used.output == len(model.answer)
            assert used.input == response_body["usage"]["input_tokens"]
        else:
            # The first process may have generated tokens that are not in the journal.
            assert journal_tokens <= used.output <= STALLED_AFTER
