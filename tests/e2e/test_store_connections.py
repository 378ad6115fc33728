"""Connections to Redis that break at any command of a request: the client gets the answer or the store's own error."""

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
from tests.mcp.conftest import Upstream, start_upstream
from unisono.core.access import KeyLimits

WIRE = WIRES["vllm"]
RESPONSE: Json = {"model": "gpt-oss", "input": "Hi"}
CHAT: Json = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}
REQUESTS: dict[str, tuple[str, Json]] = {
    "response": ("/v1/responses", RESPONSE),
    "response, streamed": ("/v1/responses", {**RESPONSE, "stream": True}),
    "response, in the background": ("/v1/responses", {**RESPONSE, "background": True}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat, streamed": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "message": ("/v1/messages", {**CHAT, "max_tokens": 100}),
    "message, streamed": ("/v1/messages", {**CHAT, "max_tokens": 100, "stream": True}),
    "completion": ("/v1/completions", {"model": "gpt-oss", "prompt": "Hi"}),
    "conversation": ("/v1/conversations", {"items": [{"role": "user", "content": "Hi"}]}),
}


@dataclass
class Faults:
    """Breaks the command number `at`, and with `lasting` all after it."""

    at: int | None = None
    lasting: bool = False
    commands: int = 0
    broken: Callable[[], bool] = lambda: False

    def breaks(self) -> bool:
        number, self.commands = self.commands, self.commands + 1
        if self.at is None:
            return self.broken()
        return number >= self.at if self.lasting else number == self.at


@contextmanager
def connections(faults: Faults) -> Iterator[None]:
    send = AbstractConnection.send_packed_command

    async def sent(connection: AbstractConnection, *arguments: Any, **options: Any) -> None:
        if faults.breaks():
            await connection.disconnect(nowait=True)
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")
        await send(connection, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AbstractConnection, "send_packed_command", sent)
        yield


Post = Callable[[str, Json], Any]


@asynccontextmanager
async def serving(url: str) -> AsyncIterator[Post]:
    """A gateway with virtual keys; requests carry one that has limits."""
    async with FakeVllm(tokens=[]) as fake:
        fake.script = lambda asked: WIRE.script(ANSWER)
        config = with_keys(config_of(f"vllm@{fake.url}", unisono={"raw_completions": True}), url)
        config["store"]["deadline_s"] = 5
        async with gateway(config) as running, ring(url) as keys:
            _, key = await keys.issue(limits=KeyLimits(rpm=100_000, tpm=100_000_000), raw=True)

            async def post(path: str, body: Json) -> Answer:
                return await running.post(path, json.dumps(body).encode(), **bearing(key))

            yield post


def check(answer: Answer) -> None:
    about = (answer.status, answer.raw[-400:])
    assert answer.status in (200, 503), about
    assert b"internal_error" not in answer.raw, about
    if answer.status == 503:
        assert b"store" in answer.raw, about


@pytest.mark.slow
@pytest.mark.parametrize("lasting", [False, True], ids=["one command", "all from one command on"])
@pytest.mark.parametrize("name", REQUESTS)
async def test_no_broken_connection_is_an_internal_error(redis_server: Server, name: str, lasting: bool) -> None:
    path, body = REQUESTS[name]
    database = 100 + 2 * list(REQUESTS).index(name) + lasting
    async with serving(f"{redis_server.url.removesuffix('/0')}/{database}") as post:
        assert (await post(path, body)).status == 200
        counted = Faults()
        with connections(counted):
            assert (await post(path, body)).status == 200
        assert counted.commands > 0
        for at in range(counted.commands):
            with connections(Faults(at, lasting)):
                check(await post(path, body))
            assert (await post(path, body)).status == 200


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    with start_upstream(tmp_path_factory.mktemp("upstream")) as (_, found):
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_whose_tools_ran_fails_without_a_retry(
    redis_server: Server, upstream: Upstream, stream: bool
) -> None:
    """Clients repeat what was answered with 503, and with it the calls."""
    name = f"kept{stream}"
    async with FakeVllm(tokens=[]) as fake:
        fake.script = lambda asked: WIRE.script(
            ANSWER if result("echo", name) in ENCODING.decode(asked["prompt"]) else calls("echo", text=name)
        )
        store = {"url": f"{redis_server.url.removesuffix('/0')}/{150 + stream}", "deadline_s": 5}
        config = config_of(f"vllm@{fake.url}", store=store, mcp_servers=hosts(upstream)["mcp_servers"])
        async with gateway(config) as running:
            body = {**RESPONSE, "tools": [DOCS], "stream": stream}
            with connections(Faults(broken=lambda: bool(upstream.noted(f"echo {name}")))):
                answer = await running.post("/v1/responses", json.dumps(body).encode())
    assert answer.status == 200
    response = answer.events[-1]["response"] if stream else answer.body
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert [call["output"] for call in made(response)] == [name]
    assert upstream.noted(f"echo {name}") == [f"echo {name}"]
