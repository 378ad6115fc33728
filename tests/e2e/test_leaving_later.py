"""A client that leaves while there is nothing to tell it: it waits for a place, a tool is being run, something is held
until it is whole, or the next step is on its way. Whatever works for it is free at once, on every surface."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.gateway import Gateway, gateway
from tests.e2e.hosting import DOCS, calls, hosts
from tests.e2e.slow_clients import SlowClient, over_http, over_websocket, request
from tests.e2e.wires import WIRES, Fake, Script, asked, deployment
from tests.fakes import stall_at
from tests.mcp.conftest import Upstream, start_upstream

AT_ONCE_S = 1.0
"""250 ms is the promise, and what an idle machine needs is a few; the rest is for a busy one."""
WIRE = WIRES["mlx_server"]
"""Nothing can be kept to a schema there, so an answer that has to be of one is held."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
LOOK = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"], "additionalProperties": False}
SERIAL = itertools.count()

pytestmark = pytest.mark.asyncio(loop_scope="module")

Leaving = Callable[..., Any]


async def chat(url: str, model: str, *, stream: bool, hosted: bool) -> SlowClient:
    tool = {"type": "function", "function": {"name": "look", "parameters": LOOK, "strict": True}}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    more = {"unisono": {"run_tools": True}} if hosted else {"tools": [tool], "response_format": form}
    return await over_http(url, request("POST", "/v1/chat/completions", {**body, **more}))


def response(model: str, *, hosted: bool) -> dict[str, Any]:
    tool = {"type": "function", "name": "look", "parameters": LOOK, "strict": True}
    form = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
    more = {"tools": [DOCS]} if hosted else {"tools": [tool], "text": form}
    return {"model": model, "input": "Hi", "store": False, **more}


async def responses(url: str, model: str, *, stream: bool, hosted: bool) -> SlowClient:
    body = {**response(model, hosted=hosted), "stream": stream}
    return await over_http(url, request("POST", "/v1/responses", body))


async def websocket(url: str, model: str, *, stream: bool, hosted: bool) -> SlowClient:
    return await over_websocket(url, "/v1/responses", response(model, hosted=hosted))


WAYS: dict[str, tuple[Leaving, bool]] = {
    "chat, whole": (chat, False),
    "chat, streamed": (chat, True),
    "responses, whole": (responses, False),
    "responses, streamed": (responses, True),
    "websocket": (websocket, True),
}
in_every_way = pytest.mark.parametrize(("ask", "stream"), WAYS.values(), ids=WAYS)


@dataclass
class Site:
    """`gpt-oss` is served without a limit, `gpt-oss-narrow` to one client at a time; both may have their tools run."""

    fake: Fake
    gateway: Gateway
    upstream: Upstream

    def say(self, *outputs: str | Script) -> None:
        scripts = [WIRE.script(each) if isinstance(each, str) else each for each in outputs]
        left = iter(scripts)
        self.fake.script = lambda asked: next(left, scripts[-1])  # type: ignore[assignment]
        self.fake.requests.clear()

    async def come(self, ask: Leaving, stream: bool, *, hosted: bool = False, model: str = "gpt-oss") -> SlowClient:
        client: SlowClient = await ask(self.gateway.url, model, stream=stream, hosted=hosted)
        return client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(upstream: Upstream) -> AsyncIterator[Site]:
    async with WIRE.fake() as fake:
        entries = [
            deployment("gpt-oss", WIRE, fake),
            deployment("gpt-oss-narrow", WIRE, fake, max_parallel_requests=1),
        ]
        async with gateway({"model_list": entries, **hosts(upstream)}) as running:
            yield Site(fake, running, upstream)


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    with start_upstream(tmp_path_factory.mktemp("upstream")) as (_, found):
        yield found


async def left(client: SlowClient) -> float:
    """When it left."""
    await client.end()
    return asyncio.get_running_loop().time()


@in_every_way
async def test_leaving_while_a_tool_is_run_tells_its_server_and_asks_nobody_for_more(
    site: Site, ask: Leaving, stream: bool
) -> None:
    name = f"number {next(SERIAL)}"
    site.say(calls("slow", seconds=30, name=name), "<|channel|>final<|message|>Done.<|return|>")
    client = await site.come(ask, stream, hosted=True)
    await site.upstream.until_noted(f"slow begins {name}")
    await client.end()
    await site.upstream.until_noted(f"slow cancelled {name}", within=AT_ONCE_S)
    await asyncio.sleep(0.05)
    assert len(asked(site.fake)) == 1


@in_every_way
async def test_leaving_in_the_step_behind_a_tool_frees_the_backend(site: Site, ask: Leaving, stream: bool) -> None:
    last = WIRE.script("<|channel|>final<|message|>Well, then.", faults=(stall_at(1),))
    site.say(calls("echo", text="x"), last)
    client = await site.come(ask, stream, hosted=True)
    await site.fake.asked(2)
    await asyncio.sleep(0.05)
    gone_from = await left(client)
    assert await site.fake.gone(1) - gone_from < AT_ONCE_S


HELD = {
    "an answer that has to be of a schema": ('<|channel|>final<|message|>{"a":"' + "la " * 400,),
    "the arguments of a call": (
        '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"' + "sky " * 400,
    ),
    "an answer that is written again": (
        "<|channel|>final<|message|>No.<|return|>",
        '<|channel|>final<|message|>{"a":"' + "la " * 400,
    ),
    "a call that is written again": (
        '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":<|call|>',
        '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"' + "sky " * 400,
    ),
}


@in_every_way
@pytest.mark.parametrize("said", HELD.values(), ids=HELD)
async def test_leaving_while_something_is_held_frees_the_backend(
    site: Site, said: tuple[str, ...], ask: Leaving, stream: bool
) -> None:
    *before, last = said
    site.say(*before, WIRE.script(last, delay_s=0.01))
    client = await site.come(ask, stream)
    await site.fake.asked(len(said))
    await asyncio.sleep(0.08)
    gone_from = await left(client)
    assert await site.fake.gone(len(said) - 1) - gone_from < AT_ONCE_S
    assert len(asked(site.fake)) == len(said)


@in_every_way
async def test_leaving_the_line_for_a_place_asks_nobody_and_makes_room(site: Site, ask: Leaving, stream: bool) -> None:
    site.say(WIRE.script("<|channel|>final<|message|>Well, then.", faults=(stall_at(3),)))
    first = await site.come(ask, stream, model="gpt-oss-narrow", hosted=True)
    await site.fake.asked()
    waiting = [await site.come(ask, stream, model="gpt-oss-narrow", hosted=True) for _ in range(3)]
    await asyncio.sleep(0.1)
    for client in waiting[:2]:
        await client.end()
    await asyncio.sleep(0.05)
    assert len(asked(site.fake)) == 1
    gone_from = await left(first)
    assert await site.fake.gone(0) - gone_from < AT_ONCE_S
    await site.fake.asked(2, within=AT_ONCE_S)
    await asyncio.sleep(0.05)
    await waiting[2].end()
    await site.fake.gone(1, within=AT_ONCE_S)
    assert len(asked(site.fake)) == 2
