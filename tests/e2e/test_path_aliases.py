"""Paths of Azure and of older OpenAI clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.keyed import MASTER, keyed
from tests.fakes.openai_api import FakeOpenAi
from tests.fakes.openai_modes import FakeModes
from tests.passthrough.test_embeddings import embedder
from tests.passthrough.test_passing_chat import entry, served
from unisono.api.path_aliases import resolved

RESOLVED: dict[str, tuple[str, str, str]] = {
    "Azure": ("/openai/deployments/other/chat/completions", "/v1/chat/completions", "other"),
    "a slash in the name": ("/openai/deployments/openai/gpt-oss/completions", "/v1/completions", "openai/gpt-oss"),
    "a name like an operation": ("/engines/chat/embeddings", "/v1/embeddings", "chat"),
    "engines": ("/engines/other/embeddings", "/v1/embeddings", "other"),
    "engines of a version": ("/v1/engines/other/completions", "/v1/completions", "other"),
    "Azure with a version": ("/openai/v1/responses/resp_1", "/v1/responses/resp_1", ""),
    "Azure without a deployment": ("/openai/responses", "/v1/responses", ""),
    "unknown operation": ("/openai/deployments/other/extensions", "/openai/deployments/other/extensions", ""),
    "no model": ("/engines//embeddings", "/engines//embeddings", ""),
    "no operation": ("/engines/other", "/engines/other", ""),
    "the gateway's own": ("/v1/chat/completions", "/v1/chat/completions", ""),
    "another beginning": ("/openai", "/openai", ""),
}


@pytest.mark.parametrize(("path", "own", "model"), RESOLVED.values(), ids=RESOLVED)
def test_a_path_stands_for_one_of_the_gateway(path: str, own: str, model: str) -> None:
    assert resolved(path) == (own, model)


@pytest.mark.parametrize("named", [{}, {"model": "another"}], ids=["in the path", "in both"])
@pytest.mark.parametrize("path", ["/openai/deployments/other", "/engines/other", "/v1/engines/other"])
async def test_the_model_of_the_path_answers(path: str, named: dict[str, Any]) -> None:
    async with (
        FakeOpenAi() as chat,
        FakeModes() as modes,
        served(entry(chat.url), embedder(modes.url, name="a/b")) as running,
    ):
        body = {"messages": [{"role": "user", "content": "Hi"}], **named}
        answer = await running.post(f"{path}/chat/completions?api-version=2024-10-21", json.dumps(body).encode())
        vectors = await running.post(
            f"{path.replace('other', 'a%2Fb')}/embeddings", json.dumps({"input": "Hi", **named}).encode()
        )
    assert answer.status == 200, answer.raw
    assert (answer.body["model"], vectors.body["model"]) == ("other", "a/b")
    assert chat.requests[0].json["model"] == "qwen"


async def test_azures_header_carries_the_key(tmp_path: Path) -> None:
    async with FakeOpenAi() as fake, keyed({"model_list": [entry(fake.url)]}, tmp_path) as (running, keys):
        _, key = await keys.issue(models=frozenset({"other"}))
        path = "/openai/deployments/{}/chat/completions?api-version=2024-10-21"
        body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
        answers = [
            await running.post(path.format("other"), body, api_key=key),
            await running.post(path.format("other"), body, api_key="sk-wrong"),
            await running.post(path.format("other"), body),
            await running.post(path.format("forbidden"), body, api_key=key),
        ]
        listed = await running.get("/openai/models?api-version=2024-10-21", **{"api-key": key})
    assert [answer.status for answer in answers] == [200, 401, 401, 403]
    assert [model["id"] for model in listed.body["data"]] == ["other"]
    assert key not in str(fake.requests[0].headers)


async def test_an_unknown_path_of_azure_is_not_found(tmp_path: Path) -> None:
    async with FakeOpenAi() as fake, keyed({"model_list": [entry(fake.url)]}, tmp_path) as (running, _):
        answers = [await running.get(path, **{"api-key": MASTER}) for path in ("/openai/files", "/engines/x/chat")]
        # No path avoids the key.
        closed = [await running.get(path) for path in ("/openai/models", "/openai/v1/../metrics", "/engines/x")]
        # An alias leads to the paths of `/v1` only, so not to the open ones.
        page = await running.get("/openai/health/liveness")
    assert [answer.status for answer in answers] == [404, 404]
    assert [answer.status for answer in [*closed, page]] == [401] * 4


async def test_version_needs_a_key_and_ping_does_not(tmp_path: Path) -> None:
    from unisono import __version__

    async with FakeOpenAi() as fake, keyed({"model_list": [entry(fake.url)]}, tmp_path) as (running, _):
        ping, refused = await running.get("/ping"), await running.get("/version")
        version = await running.get("/version", authorization=f"Bearer {MASTER}")
    assert (ping.status, refused.status) == (200, 401)
    assert version.body == {"version": __version__}
