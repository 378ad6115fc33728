"""A client that disconnects during a retry delay frees everything at once, on every API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.e2e.gateway import Gateway, gateway
from tests.e2e.playing import Play
from tests.e2e.slow_clients import SlowClient, over_http, over_websocket, request
from tests.e2e.surfaces import SURFACES
from tests.e2e.test_failover import THINKS
from tests.fakes import FakeVllm, Refusal, WireServer, reset_at
from tests.fakes.openai_api import FakeOpenAi, OpenAiScript

# Both are long enough for a busy machine: the clients must disconnect before the delay ends.
ABORT_LIMIT_S = 2.0
RETRY_AFTER_S = 4
BUSY = Refusal(503, b"busy", headers={"Retry-After": str(RETRY_AFTER_S)})
PASS_THROUGH = frozenset({"pass-through", "pass-through responses"})


@dataclass
class Case:
    """A client of one API, and a model with one deployment that accepts one request at a time."""

    surface: str
    mode: str
    # Whether the client has received output before the retry delay.
    has_output: bool
    server: WireServer

    @property
    def model(self) -> str:
        return f"{self.surface}-{self.mode}-{self.has_output}".replace(" ", "-")

    @property
    def expected_requests(self) -> int:
        """Number of requests that reach the backend before the retry delay."""
        return 1 + self.has_output

    def body(self, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, **SURFACES[self.surface].fields, **fields}

    async def connect(self, running: Gateway) -> SlowClient:
        if self.mode == "websocket":
            return await over_websocket(running.url, "/v1/responses", self.body(store=False))
        body = self.body(stream=self.mode == "stream")
        return await over_http(running.url, request("POST", SURFACES[self.surface].path, body))

    async def serves_another_client(self, running: Gateway) -> bool:
        """Whether another client gets a response, which needs the only slot."""
        response = await running.post(SURFACES[self.surface].path, json.dumps(self.body()).encode())
        return response.status == 200


def pass_through_server() -> WireServer:
    refusals = [BUSY]
    return FakeOpenAi(lambda body: refusals.pop() if refusals else OpenAiScript())


def engine_server(*, has_output: bool) -> WireServer:
    server = FakeVllm()
    play = Play(THINKS, [reset_at(5), BUSY] if has_output else [BUSY])
    play.serve("vllm", server)
    return server


def cases() -> Iterator[Case]:
    for surface in SURFACES:
        modes = ("whole", "stream", "websocket") if surface == "responses" else ("whole", "stream")
        for mode in modes:
            if surface in PASS_THROUGH:
                yield Case(surface, mode, False, pass_through_server())
                continue
            for has_output in (False, True):
                yield Case(surface, mode, has_output, engine_server(has_output=has_output))


def deployment_of(case: Case) -> dict[str, Any]:
    passes = case.surface in PASS_THROUGH
    params = {"model": "vllm/qwen" if passes else "vllm/tiny", "api_base": case.server.url, "max_parallel_requests": 1}
    return {"model_name": case.model, "litellm_params": params, "model_info": {"harmony": not passes}}


@asynccontextmanager
async def running_gateway() -> AsyncIterator[tuple[Sequence[Case], Gateway]]:
    async with AsyncExitStack() as stack:
        all_cases = list(cases())
        for case in all_cases:
            await stack.enter_async_context(case.server)
        running = await stack.enter_async_context(
            gateway({"model_list": list(map(deployment_of, all_cases)), "unisono": {"raw_completions": True}})
        )
        assert running.app is not None
        await running.app.state.gateway.pool.wait_for_probes(60)
        yield all_cases, running


async def until(condition: Callable[[], bool], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def tasks() -> set[asyncio.Task[Any]]:
    """Return the gateway's tasks; those of the fake servers live as long as their connections."""
    return {task for task in asyncio.all_tasks() if "_Connection" not in repr(task.get_coro())}


async def all_of(awaitables: Iterable[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*awaitables)


async def test_a_disconnect_during_a_retry_delay_frees_everything() -> None:
    async with running_gateway() as (all_cases, running):
        before = tasks()
        clients = await all_of(case.connect(running) for case in all_cases)
        await all_of(case.server.asked(case.expected_requests, 10) for case in all_cases)
        # During the delay other clients use the slot while the first clients wait.
        assert all(await all_of(case.serves_another_client(running) for case in all_cases))
        assert len(tasks() - before) >= len(all_cases)
        for client in clients:
            await client.end()
        await until(lambda: not tasks() - before, ABORT_LIMIT_S)
        assert all(await all_of(case.serves_another_client(running) for case in all_cases))
        # After the delay no request is sent for the disconnected clients.
        await asyncio.sleep(RETRY_AFTER_S * 1.25 + 0.5)
        assert {case.model: len(case.server.requests) - case.expected_requests for case in all_cases} == {
            case.model: 2 for case in all_cases
        }
