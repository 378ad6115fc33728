"""LiteLLM's Python client administers this gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from litellm.proxy.client import Client

from tests.e2e.administered import AdminClient, administered

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def admin() -> AsyncIterator[AdminClient]:
    async with administered("memory://", price={"input": 1.0, "output": 2.0}) as running:
        yield running


async def call(function: Any, *arguments: Any, **named: Any) -> Any:
    return await asyncio.to_thread(function, *arguments, **named)


async def test_client_library_manages_keys(admin: AdminClient) -> None:
    await admin.made("/team/new", team_id="search", team_alias="Search")
    client = Client(base_url=admin.gateway.url, api_key=admin.key)
    made = await call(
        client.keys.generate, models=["gpt-oss"], key_alias="library", duration="30d", team_id="search", aliases={}
    )
    assert (await admin.gateway.chat_as(made["key"])).status == 200
    listed = await call(client.keys.list, page=1, size=10, return_full_object=True, include_team_keys=True)
    assert [key["key_alias"] for key in listed["keys"]] == ["library"]
    info = await call(client.keys.info, made["token"])
    assert info["info"]["models"] == ["gpt-oss"]
    changed = await call(client.keys.update, made["token"], key_alias="renamed", models=[])
    assert (changed["key_alias"], changed["models"]) == ("renamed", [])
    assert await call(client.keys.delete, keys=[made["token"]]) == {"deleted_keys": [made["token"]]}
    by_alias = await call(client.keys.generate, key_alias="second")
    assert await call(client.keys.delete, key_aliases=["second"]) == {"deleted_keys": ["second"]}
    assert by_alias["key"]
    assert [team["team_alias"] for team in await call(client.teams.list)] == ["Search"]


async def test_client_library_reads_models_and_answers(admin: AdminClient) -> None:
    client = Client(base_url=admin.gateway.url, api_key=admin.key)
    assert [model["id"] for model in await call(client.models.list)] == ["gpt-oss"]
    (model,) = await call(client.models.info)
    assert model["model_info"]["input_cost_per_token"] == 1e-6
    (group,) = await call(client.model_groups.info)
    assert group["model_group"] == "gpt-oss"
    answer = await call(client.chat.completions, "gpt-oss", [{"role": "user", "content": "Hi"}])
    assert answer["choices"][0]["message"]["content"] == "Hello."
