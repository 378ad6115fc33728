"""Redis connections that break at any command: the client gets an answer or a store error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from redis.asyncio.connection import AbstractConnection

from tests.contract.servers import Server
from tests.e2e.gateway import Answer, config_of, gateway
from tests.e2e.hosting import DOCS, calls, hosts, made, result
from tests.e2e.keyed import bearing, ring, with_keys
from tests.e2e.responses import ANSWER, Json
from tests.e2e.wires import ENCODING, WIRES
from tests.fakes import FakeVllm
from tests.mcp.conftest import Upstream
from unisono.core.quotas import KeyLimits

WIRE = WIRES["vllm"]
RESPONSE: Json = {"model": "gpt-oss", "input": "Hi"}
CHAT: Json = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
REQUESTS: dict[str, tuple[str, Json]] = {
    "response": ("/v1/responses", RESPONSE),
    "response, streamed": ("/v1/responses", {**RESPONSE, "stream": True}),
    "response, background": ("/v1/responses", {**RESPONSE, "background": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat, streamed": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "message": ("/v1/messages", {**CHAT, "max_tokens": 100}),
    "message, streamed": ("/v1/messages", {**CHAT, "max_tokens": 100, "stream": True}),
    "completion": ("/v1/completions", {"model": "gpt-oss", "prompt": "Hi"}),
    "conversation": ("/v1/conversations", {"items": [{"role": "user", "content": "Hi"}]}),
}


@dataclass
class Faults:
    """Break the command number `at`, and with `is_lasting` all later ones."""

    at: int | None = None
    is_lasting: bool = False
    commands: int = 0
    is_broken: Callable[[], bool] = lambda: False

    def should_break(self) -> bool:
        number, self.commands = self.commands, self.commands + 1
        if self.at is None:
            return self.is_broken()
        return number >= self.at if self.is_lasting else number == self.at


@contextmanager
def breaking_connections(faults: Faults) -> Iterator[None]:
    send = AbstractConnection.send_packed_command

    async def send_or_break(connection: AbstractConnection, *arguments: Any, **options: Any) -> None:
        if faults.should_break():
            await connection.disconnect(nowait=True)
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")
        await send(connection, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AbstractConnection, "send_packed_command", send_or_break)
        yield


Post = Callable[[str, Json], Any]


@asynccontextmanager
async def serving(url: str) -> AsyncIterator[Post]:
    """Run a gateway with virtual keys; requests use a key with limits."""
    async with FakeVllm(tokens=[]) as fake:
        fake.script = lambda request: WIRE.script(ANSWER)
        config = with_keys(config_of(f"vllm@{fake.url}", unisono={"raw_completions": True}), url)
        config["store"]["deadline_s"] = 5
        async with gateway(config) as running, ring(url) as keys:
            _, key = await keys.issue(limits=KeyLimits(rpm=100_000, tpm=100_000_000), raw=True)

            async def post(path: str, body: Json) -> Answer:
                return await running.post(path, json.dumps(body).encode(), **bearing(key))

            yield post


def assert_answer_or_store_error(response: Answer) -> None:
    details = (response.status, response.raw[-400:])
    assert response.status in (200, 503), details
    assert b"internal_error" not in response.raw, details
    if response.status == 503:
        assert b"store" in response.raw, details


@pytest.mark.slow
@pytest.mark.parametrize("is_lasting", [False, True], ids=["one command", "all later commands too"])
@pytest.mark.parametrize("name", REQUESTS)
async def test_a_broken_connection_is_never_an_internal_error(
    redis_server: Server, name: str, is_lasting: bool
) -> None:
    path, body = REQUESTS[name]
    database = 100 + 2 * list(REQUESTS).index(name) + is_lasting
    async with serving(f"{redis_server.url.removesuffix('/0')}/{database}") as post:
        assert (await post(path, body)).status == 200
        counter = Faults()
        with breaking_connections(counter):
            assert (await post(path, body)).status == 200
        assert counter.commands > 0
        for at in range(counter.commands):
            with breaking_connections(Faults(at, is_lasting)):
                assert_answer_or_store_error(await post(path, body))
            assert (await post(path, body)).status == 200


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_fails_without_a_retry_after_its_tools_ran(
    redis_server: Server, upstream: Upstream, stream: bool
) -> None:
    """Clients retry a 503, which would repeat the tool calls."""
    name = f"kept{stream}"
    async with FakeVllm(tokens=[]) as fake:
        fake.script = lambda request: WIRE.script(
            ANSWER if result("echo", name) in ENCODING.decode(request["prompt"]) else calls("echo", text=name)
        )
        store = {"url": f"{redis_server.url.removesuffix('/0')}/{150 + stream}", "deadline_s": 5}
        config = config_of(f"vllm@{fake.url}", store=store, mcp_servers=hosts(upstream)["mcp_servers"])
        async with gateway(config) as running:
            body = {**RESPONSE, "tools": [DOCS], "stream": stream}
            with breaking_connections(Faults(is_broken=lambda: bool(upstream.noted(f"echo {name}")))):
                reply = await running.post("/v1/responses", json.dumps(body).encode())
    assert reply.status == 200
    response = reply.events[-1]["response"] if stream else reply.body
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert [call["output"] for call in made(response)] == [name]
    assert upstream.noted(f"echo {name}") == [f"echo {name}"]
