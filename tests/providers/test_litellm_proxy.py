"""The LiteLLM proxy as a backend of the gateway, in a separate process and environment."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from bench import peer_env
from bench.processes import free_port
from tests.e2e.gateway import gateway
from tests.fakes.openai_api import FakeOpenAi
from tests.providers.test_providers import text_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.asyncio(loop_scope="module"),
]
KEY = "sk-of-the-proxy"
STARTS_WITHIN_S = 240
PROXY_ENV = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "LITELLM_LOG": "ERROR"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Start a LiteLLM proxy that serves the model `theirs`, and yield its address."""
    program = await asyncio.to_thread(peer_env.program, "litellm")
    async with FakeOpenAi() as fake:
        folder: Path = tmp_path_factory.mktemp("proxy")
        params = {"model": "openai/gpt-4o", "api_base": f"{fake.url}/v1", "api_key": "none"}
        config = {"model_list": [{"model_name": "theirs", "litellm_params": params}]}
        config["general_settings"] = {"master_key": KEY}  # type: ignore[assignment]
        (folder / "config.yaml").write_text(json.dumps(config))
        port = free_port()
        serve = ["--config", str(folder / "config.yaml"), "--host", "127.0.0.1", "--port", str(port)]
        with (folder / "log").open("wb") as log:
            child = await asyncio.create_subprocess_exec(
                str(program), *serve, "--telemetry", "False", stdout=log, stderr=log, env=os.environ | PROXY_ENV
            )
        try:
            await _wait_until_ready(f"http://127.0.0.1:{port}/health/liveliness")
            yield f"http://127.0.0.1:{port}"
        finally:
            child.terminate()
            await child.wait()


async def _wait_until_ready(url: str) -> None:
    async with asyncio.timeout(STARTS_WITHIN_S), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)


BACKEND_PREFIXES = {
    "vllm adapter": "vllm/theirs",
    "litellm_proxy provider": "litellm_proxy/theirs",
    "openai provider": "openai/theirs",
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("model", BACKEND_PREFIXES.values(), ids=BACKEND_PREFIXES)
async def test_a_chat_completion_through_litellms_proxy(model: str, stream: bool, proxy: str) -> None:
    params: dict[str, Any] = {"model": model, "api_base": f"{proxy}/v1", "api_key": KEY}
    async with gateway({"model_list": [{"model_name": "m", "litellm_params": params}]}) as running:
        answer = await running.chat(model="m", stream=stream)
    assert answer.status == 200, answer.raw
    assert text_of(answer) == "Four."
    assert {event["model"] for event in answer.events or [answer.body]} == {"m"}
    assert answer.done is stream


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_response_through_litellms_proxy(stream: bool, proxy: str) -> None:
    params = {"model": "vllm/theirs", "api_base": proxy, "api_key": KEY}
    async with gateway({"model_list": [{"model_name": "m", "litellm_params": params}]}) as running:
        body = {"model": "m", "input": "Hi", "stream": stream}
        answer = await running.post("/v1/responses", json.dumps(body).encode())
    assert answer.status == 200, answer.raw
    response = answer.events[-1]["response"] if stream else answer.body
    assert response["output"][0]["content"][0]["text"] == "Four."
    assert (response["status"], response["model"]) == ("completed", "m")
