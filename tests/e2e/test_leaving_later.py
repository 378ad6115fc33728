"""A client that disconnects while it receives nothing frees everything at once.

Phases: waiting in a queue, a running server tool, buffered output, and the start of the next step. Tested on every
API.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.gateway import Gateway, gateway
from tests.e2e.hosting import DOCS, calls, hosts
from tests.e2e.slow_clients import SlowClient, over_http, over_websocket, request
from tests.e2e.wires import WIRES, Fake, Script, asked, deployment
from tests.fakes import stall_at
from tests.mcp.conftest import Upstream

# The target is 250 ms and an idle machine needs a few; the rest is for a busy machine.
ABORT_LIMIT_S = 1.0
# A backend without guided decoding, so that answers with a schema are buffered.
WIRE = WIRES["mlx_server"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
LOOK = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"], "additionalProperties": False}
SERIAL = itertools.count()

pytestmark = pytest.mark.asyncio(loop_scope="module")

Ask = Callable[..., Any]


async def chat(url: str, model: str, *, stream: bool, hosted: bool) -> SlowClient:
    tool = {"type": "function", "function": {"name": "look", "parameters": LOOK, "strict": True}}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": stream}
    more = {"unisono": {"run_tools": True}} if hosted else {"tools": [tool], "response_format": form}
    return await over_http(url, request("POST", "/v1/chat/completions", {**body, **more}))


def response_body(model: str, *, hosted: bool) -> dict[str, Any]:
    tool = {"type": "function", "name": "look", "parameters": LOOK, "strict": True}
    form = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
    more = {"tools": [DOCS]} if hosted else {"tools": [tool], "text": form}
    return {"model": model, "input": "Hi", "store": False, **more}


async def responses(url: str, model: str, *, stream: bool, hosted: bool) -> SlowClient:
    body = {**response_body(model, hosted=hosted), "stream": stream}
    return await over_http(url, request("POST", "/v1/responses", body))


async def websocket(url: str, model: str, *, stream: bool, hosted: bool) -> SlowClient:
    return await over_websocket(url, "/v1/responses", response_body(model, hosted=hosted))


SURFACES: dict[str, tuple[Ask, bool]] = {
    "chat, whole": (chat, False),
    "chat, streamed": (chat, True),
    "responses, whole": (responses, False),
    "responses, streamed": (responses, True),
    "websocket": (websocket, True),
}
on_every_api = pytest.mark.parametrize(("ask", "stream"), SURFACES.values(), ids=SURFACES)


@dataclass
class Site:
    """A gateway; `gpt-oss` has no limit, `gpt-oss-narrow` accepts one request at a time.

    Server tools are available to both models.
    """

    fake: Fake
    gateway: Gateway
    upstream: Upstream

    def script_outputs(self, *outputs: str | Script) -> None:
        scripts = [WIRE.script(output) if isinstance(output, str) else output for output in outputs]
        remaining = iter(scripts)
        self.fake.script = lambda body: next(remaining, scripts[-1])  # type: ignore[assignment]
        self.fake.requests.clear()

    async def connect(self, ask: Ask, stream: bool, *, hosted: bool = False, model: str = "gpt-oss") -> SlowClient:
        client: SlowClient = await ask(self.gateway.url, model, stream=stream, hosted=hosted)
        return client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(upstream: Upstream) -> AsyncIterator[Site]:
    async with WIRE.fake() as fake:
        deployments = [
            deployment("gpt-oss", WIRE, fake),
            deployment("gpt-oss-narrow", WIRE, fake, max_parallel_requests=1),
        ]
        async with gateway({"model_list": deployments, **hosts(upstream)}) as running:
            yield Site(fake, running, upstream)


async def disconnect(client: SlowClient) -> float:
    """Close the connection and return the time of the event loop."""
    await client.end()
    return asyncio.get_running_loop().time()


@on_every_api
async def test_a_disconnect_during_a_tool_call_cancels_the_call(site: Site, ask: Ask, stream: bool) -> None:
    name = f"number {next(SERIAL)}"
    site.script_outputs(calls("slow", seconds=30, name=name), "<|channel|>final<|message|>Done.<|return|>")
    client = await site.connect(ask, stream, hosted=True)
    await site.upstream.until_noted(f"slow begins {name}")
    await client.end()
    await site.upstream.until_noted(f"slow cancelled {name}", within=ABORT_LIMIT_S)
    await asyncio.sleep(0.05)
    assert len(asked(site.fake)) == 1


@on_every_api
async def test_a_disconnect_in_the_step_after_a_tool_frees_the_backend(site: Site, ask: Ask, stream: bool) -> None:
    last = WIRE.script("<|channel|>final<|message|>Well, then.", faults=(stall_at(1),))
    site.script_outputs(calls("echo", text="x"), last)
    client = await site.connect(ask, stream, hosted=True)
    await site.fake.asked(2)
    await asyncio.sleep(0.05)
    left_at = await disconnect(client)
    assert await site.fake.gone(1) - left_at < ABORT_LIMIT_S


BUFFERED = {
    "answer with a schema": ('<|channel|>final<|message|>{"a":"' + "la " * 400,),
    "arguments of a call": (
        '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"' + "sky " * 400,
    ),
    "regenerated answer": (
        "<|channel|>final<|message|>No.<|return|>",
        '<|channel|>final<|message|>{"a":"' + "la " * 400,
    ),
    "regenerated call": (
        '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":<|call|>',
        '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"' + "sky " * 400,
    ),
}


@on_every_api
@pytest.mark.parametrize("outputs", BUFFERED.values(), ids=BUFFERED)
async def test_a_disconnect_while_output_is_buffered_frees_the_backend(
    site: Site, outputs: tuple[str, ...], ask: Ask, stream: bool
) -> None:
    *before, last = outputs
    site.script_outputs(*before, WIRE.script(last, delay_s=0.01))
    client = await site.connect(ask, stream)
    await site.fake.asked(len(outputs))
    await asyncio.sleep(0.08)
    left_at = await disconnect(client)
    assert await site.fake.gone(len(outputs) - 1) - left_at < ABORT_LIMIT_S
    assert len(asked(site.fake)) == len(outputs)


@pytest.mark.sampled(one_in=3)
@on_every_api
async def test_a_disconnect_in_the_queue_sends_no_request_and_frees_the_slot(
    site: Site, ask: Ask, stream: bool
) -> None:
    site.script_outputs(WIRE.script("<|channel|>final<|message|>Well, then.", faults=(stall_at(3),)))
    first = await site.connect(ask, stream, model="gpt-oss-narrow", hosted=True)
    await site.fake.asked()
    waiting = [await site.connect(ask, stream, model="gpt-oss-narrow", hosted=True) for _ in range(3)]
    await asyncio.sleep(0.1)
    for client in waiting[:2]:
        await client.end()
    await asyncio.sleep(0.05)
    assert len(asked(site.fake)) == 1
    left_at = await disconnect(first)
    assert await site.fake.gone(0) - left_at < ABORT_LIMIT_S
    await site.fake.asked(2, within=ABORT_LIMIT_S)
    await asyncio.sleep(0.05)
    await waiting[2].end()
    await site.fake.gone(1, within=ABORT_LIMIT_S)
    assert len(asked(site.fake)) == 2
