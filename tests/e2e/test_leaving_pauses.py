"""A client that leaves during the pause before a retry frees everything at once, on every surface."""

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

AT_ONCE_S = 1.0
PAUSE_S = 2
BUSY = Refusal(503, b"busy", headers={"Retry-After": str(PAUSE_S)})
PASSING = frozenset({"pass-through", "pass-through responses"})


@dataclass
class Case:
    """A client of one surface, before a model with one deployment that takes one request at a time."""

    surface: str
    way: str
    has_output: bool
    """Whether the client has seen some of the answer."""
    server: WireServer

    @property
    def model(self) -> str:
        return f"{self.surface}-{self.way}-{self.has_output}".replace(" ", "-")

    @property
    def asked(self) -> int:
        """Requests that reach the backend before the pause."""
        return 1 + self.has_output

    def body(self, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, **SURFACES[self.surface].fields, **fields}

    async def come(self, running: Gateway) -> SlowClient:
        if self.way == "websocket":
            return await over_websocket(running.url, "/v1/responses", self.body(store=False))
        body = self.body(stream=self.way == "stream")
        return await over_http(running.url, request("POST", SURFACES[self.surface].path, body))

    async def is_served(self, running: Gateway) -> bool:
        """Whether another client gets an answer, which takes the only place."""
        answer = await running.post(SURFACES[self.surface].path, json.dumps(self.body()).encode())
        return answer.status == 200


def passing_server() -> WireServer:
    left = [BUSY]
    return FakeOpenAi(lambda asked: left.pop() if left else OpenAiScript())


def engine_server(*, has_output: bool) -> WireServer:
    server = FakeVllm()
    play = Play(THINKS, [reset_at(5), BUSY] if has_output else [BUSY])
    play.serve("vllm", server)
    return server


def cases() -> Iterator[Case]:
    for surface in SURFACES:
        ways = ("whole", "stream", "websocket") if surface == "responses" else ("whole", "stream")
        for way in ways:
            if surface in PASSING:
                yield Case(surface, way, False, passing_server())
                continue
            for has_output in (False, True):
                yield Case(surface, way, has_output, engine_server(has_output=has_output))


def entry_of(case: Case) -> dict[str, Any]:
    passes = case.surface in PASSING
    params = {"model": "vllm/qwen" if passes else "vllm/tiny", "api_base": case.server.url, "max_parallel_requests": 1}
    return {"model_name": case.model, "litellm_params": params, "model_info": {"harmony": not passes}}


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Sequence[Case], Gateway]]:
    async with AsyncExitStack() as stack:
        found = list(cases())
        for case in found:
            await stack.enter_async_context(case.server)
        running = await stack.enter_async_context(
            gateway({"model_list": list(map(entry_of, found)), "unisono": {"raw_completions": True}})
        )
        assert running.app is not None
        await running.app.state.gateway.pool.settled(60)
        yield found, running


async def until(holds: Callable[[], bool], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.01)


def tasks() -> set[asyncio.Task[Any]]:
    """Tasks of the gateway: those of the servers behind it live as long as its connections to them."""
    return {task for task in asyncio.all_tasks() if "_Connection" not in repr(task.get_coro())}


async def all_of(awaited: Iterable[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*awaited)


async def test_everything_is_free_at_once() -> None:
    async with served() as (found, running):
        before = tasks()
        clients = await all_of(case.come(running) for case in found)
        await all_of(case.server.asked(case.asked, 10) for case in found)
        # The place is somebody else's during the pause, and the clients still wait.
        assert all(await all_of(case.is_served(running) for case in found))
        assert len(tasks() - before) >= len(found)
        for client in clients:
            await client.end()
        await until(lambda: not tasks() - before, AT_ONCE_S)
        assert all(await all_of(case.is_served(running) for case in found))
        # Behind the pause nothing is asked for those who left.
        await asyncio.sleep(PAUSE_S * 1.25 + 0.5)
        assert {case.model: len(case.server.requests) - case.asked for case in found} == {
            case.model: 2 for case in found
        }
