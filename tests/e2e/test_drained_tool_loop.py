"""Deployments drained while the gateway runs a tool: the model calls that follow finish the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.gateway import config_of
from tests.e2e.hosting import calls, hosts, result
from tests.e2e.keyed import MASTER, bearing, with_keys
from tests.e2e.replicas import Client, replica
from tests.fakes import FakeVllm, Refusal, VllmScript
from tests.mcp.conftest import Upstream
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
ANSWER = ENCODING.encode_marked("<|channel|>final<|message|>ok<|return|>")
# Time for which the tool runs, in seconds: enough to drain a deployment meanwhile.
TOOL_S = 1.0
AFTER_TOOL = ENCODING.encode_marked(result("slow", "done"))

Script = Callable[[Any], VllmScript | Refusal]


def has_result(prompt: Sequence[int]) -> bool:
    size = len(AFTER_TOOL)
    return any([*prompt[at : at + size]] == [*AFTER_TOOL] for at in range(len(prompt) - size + 1))


def tool_then_answer(asked: Any) -> VllmScript | Refusal:
    if not has_result(asked["prompt"]):
        return VllmScript(tokens=ENCODING.encode_marked(calls("slow", seconds=TOOL_S)))
    return VllmScript(tokens=ANSWER)


def slow_answer(asked: Any) -> VllmScript | Refusal:
    if has_result(asked["prompt"]):
        return VllmScript(tokens=ANSWER, first_delay_s=1.0)
    return tool_then_answer(asked)


@dataclass(frozen=True)
class Desk:
    """A gateway process with scripted deployments `vllm-1`, `vllm-2`, and an MCP server."""

    client: Client
    upstream: Upstream
    fakes: Sequence[FakeVllm]

    async def chat(self) -> tuple[int, Any]:
        body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}], "unisono": {"run_tools": True}}
        return await self.client.asks("POST", "/v1/chat/completions", body, **bearing(MASTER))

    async def tools(self, count: int) -> None:
        """Wait until `count` tool calls have begun."""
        async with asyncio.timeout(20):
            while len(self.upstream.noted("slow begins")) < count:
                await asyncio.sleep(0.02)

    def served(self) -> list[int]:
        """Return the number of generations of each deployment."""
        return [len(fake.requests) for fake in self.fakes]

    async def drain_first(self) -> int:
        """Drain the deployment that served the first request; return its index."""
        await self.tools(1)
        first = next(n for n, count in enumerate(self.served()) if count)
        status, _ = await self.client.asks("POST", f"/model/vllm-{first + 1}/drain", {}, **bearing(MASTER))
        assert status == 200
        return first


@asynccontextmanager
async def desk(upstream: Upstream, folder: Path, *scripts: Script, **params: Any) -> AsyncIterator[Desk]:
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeVllm(script=script)) for script in scripts]
        config = config_of(*(f"vllm@{fake.url}" for fake in fakes), **hosts(upstream))
        for entry in config["model_list"]:
            entry["litellm_params"].update(params)
        keyed_config = with_keys(config, f"sqlite://{folder}/state.db")
        keyed_config["store"]["deadline_s"] = 5.0
        process = await stack.enter_async_context(replica(folder / "gateway", keyed_config))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        upstream.notes.write_text("")
        yield Desk(Client(process.url, session), upstream, fakes)


def content(answer: tuple[int, Any]) -> str:
    status, body = answer
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])


@pytest.mark.slow
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
async def test_the_answer_ends_although_its_deployment_is_drained(
    upstream: Upstream, tmp_path: Path, count: int
) -> None:
    async with desk(upstream, tmp_path, *[tool_then_answer] * count) as running:
        asked = asyncio.create_task(running.chat())
        first = await running.drain_first()
        assert content(await asked) == "ok"
        # New requests get no slot on the drained deployment.
        served = running.served()[first]
        status, _ = await running.chat()
        assert status == (200 if count > 1 else 503)
        assert running.served()[first] == served


@pytest.mark.slow
async def test_the_answer_moves_if_the_drained_deployment_fails(upstream: Upstream, tmp_path: Path) -> None:
    async with desk(upstream, tmp_path, tool_then_answer, tool_then_answer) as running:
        asked = asyncio.create_task(running.chat())
        first = await running.drain_first()
        running.fakes[first].script = lambda _: Refusal(500, b'{"error": "stopped"}')
        answer = await asked
        assert content(answer) == "ok"
        assert answer[1]["unisono"]["backend"] == f"vllm-{2 - first}"
        assert running.served()[1 - first] == 1


@pytest.mark.slow
async def test_answers_of_a_full_drained_deployment_wait_for_each_other(upstream: Upstream, tmp_path: Path) -> None:
    async with desk(upstream, tmp_path, slow_answer, max_parallel_requests=1) as running:
        # Both tools run at once; afterwards only one answer at a time has a slot.
        asked = [asyncio.create_task(running.chat()) for _ in range(3)]
        await running.tools(3)
        await running.drain_first()
        assert [content(each) for each in await asyncio.gather(*asked)] == ["ok"] * 3
