"""Settings, notes and limits of the request for a background response that another process continues."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.continuing import Model, prompts_about
from tests.e2e.gateway import config_of
from tests.e2e.keyed import bearing, ring, with_keys
from tests.e2e.replicas import LEASE_S, Client, Json, Told, replica
from tests.e2e.wires import ENCODING
from tests.fakes import FakeVllm, VllmScript
from unisono.core.quotas import KeyLimits

QUESTION = "Count to thirty."
UPDATE: Json = {"type": "configuration_update", "reasoning": {"effort": "high"}}


async def taken_over(folder: Path, fake: FakeVllm, fields: Json) -> Json:
    """Kill the process of a background response; return the response that the next process completes."""
    store = {"url": f"sqlite:///{str(folder).removeprefix('/')}/state.db", "lease_s": LEASE_S}
    config = config_of(f"vllm@{fake.url}", store=store)
    body: Json = {"model": "gpt-oss", "background": True, "stream": True, **fields}
    received = Told()
    async with aiohttp.ClientSession() as session:
        async with replica(folder, config) as first:
            await Client(first.url, session).listens(received, "/v1/responses", body, until=20)
            first.kill()
            await first.ended()
        async with replica(folder, config) as second:
            client = Client(second.url, session)
            await client.resumes(received, received.id)
            return await client.get(f"/v1/responses/{received.id}")


@pytest.mark.slow
async def test_settings_and_notes_from_the_input_stay_after_a_takeover(tmp_path: Path) -> None:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}
    items = [image, {"type": "file_search_call", "id": "fs_1"}, UPDATE, {"role": "user", "content": QUESTION}]
    async with FakeVllm(script=Model(delay_s=0.03).script) as fake:
        response = await taken_over(tmp_path, fake, {"input": items})
        assert response["status"] == "completed"
        media, search = response["unisono"]["notes"]
        assert media.startswith("input.0.content.0: ")
        assert search.startswith("input.1: no effect")
        assert response["unisono"]["recoveries"] == ["media-left-out"]
        first, *others = [ENCODING.decode(prompt) for prompt in prompts_about(fake, QUESTION)]
        assert others
        assert "Reasoning: high" in first
        assert all(prompt.startswith(first) for prompt in others)


@pytest.mark.slow
async def test_no_limit_refuses_a_response_that_is_taken_over_before_its_first_token(tmp_path: Path) -> None:
    url = f"sqlite:///{str(tmp_path).removeprefix('/')}/state.db"
    answer = ENCODING.encode_marked("<|channel|>final<|message|>Hello.<|return|>")
    async with FakeVllm(script=lambda _: VllmScript(tokens=answer, first_delay_s=60)) as fake:
        config = with_keys(config_of(f"vllm@{fake.url}"), url)
        config["store"]["lease_s"] = LEASE_S
        async with ring(url) as keys:
            _, key = await keys.issue(limits=KeyLimits(rpm=1))
        async with aiohttp.ClientSession(headers=bearing(key)) as session:
            async with replica(tmp_path, config) as first:
                body = {"model": "gpt-oss", "background": True, "input": QUESTION}
                created = await Client(first.url, session).post("/v1/responses", body)
                while not fake.requests:
                    await asyncio.sleep(0.01)
                first.kill()
                await first.ended()
            fake.script = lambda _: VllmScript(tokens=answer)
            async with replica(tmp_path, config) as second:
                response = await Client(second.url, session).over(created["id"])
                used = (await Client(second.url, session).get("/v1/usage"))["total"]
    assert (response["status"], response["error"]) == ("completed", None)
    assert used["requests"] == 1
