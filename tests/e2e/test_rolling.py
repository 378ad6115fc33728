"""Replicas restarted one after the other under load: nobody notices."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.api.responses.folding import fold
from tests.contract.servers import Server
from tests.e2e.gateway import config_of
from tests.e2e.replicas import LEASE_S, Client, Json, Replica, Told
from tests.fakes import FakeVllm, VllmScript
from tests.listening import connected, listening
from unisono.harmony.encoding import load_encoding

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>" + "la " * 60 + "<|return|>")
TEXT = ("la " * 60).strip()
STREAMS = 200
BACKGROUND = 10
ASK_EVERY_S = 0.5
"""How often the balancer asks for readiness."""


@dataclass
class Balancer:
    """Passes each connection to a replica that says it is ready, taking turns, and never moves one."""

    session: aiohttp.ClientSession
    replicas: list[Replica]
    ready: set[str] = field(default_factory=set)
    refused: int = 0
    """Connections that no replica took."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        turns = itertools.count()
        ready = asyncio.Event()

        async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            urls = sorted(self.ready)
            port = int(urls[next(turns) % len(urls)].rpartition(":")[2])
            try:
                async with connected(port) as (there, beyond):
                    await asyncio.gather(passed(reader, beyond), passed(there, writer))
            except OSError:
                self.refused += 1
                writer.transport.abort()

        watching = [asyncio.create_task(self._watch(each, ready)) for each in self.replicas]
        try:
            async with listening(joined) as listener:
                await ready.wait()
                yield listener.url
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    async def _watch(self, replica: Replica, ready: asyncio.Event) -> None:
        known = ""
        while True:
            with suppress(aiohttp.ClientError):
                known = known or replica.url
                async with self.session.get(f"{replica.url}/health/readiness") as answer:
                    (self.ready.add if answer.status == 200 else self.ready.discard)(replica.url)
                    if answer.status == 200:
                        ready.set()
            await asyncio.sleep(ASK_EVERY_S)


async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with suppress(OSError):
        writer.close()


async def listened(client: Client) -> Told:
    body = {"model": "gpt-oss", "input": "Hi", "stream": True, "store": False}
    return await client.listens(Told(), "/v1/responses", body)


async def restarted(one: Replica, balancer: Balancer) -> None:
    one.signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        assert await one.ended() == 0
    assert one.url not in balancer.ready
    one.url = ""
    await one.start()
    async with asyncio.timeout(30):
        while one.url not in balancer.ready:
            await asyncio.sleep(0.05)


async def test_replicas_are_restarted_one_after_the_other_and_no_client_notices(tmp_path: Path) -> None:
    redis = Server(tmp_path, ("appendonly yes",)).start()
    async with AsyncExitStack() as stack:
        stack.callback(redis.end)

        def script(asked: dict[str, Any]) -> VllmScript:
            return VllmScript(tokens=rest_of(asked), per_chunk=1, delay_s=0.1)

        fake = await stack.enter_async_context(FakeVllm(script=script))
        store = {"url": f"redis://127.0.0.1:{redis.port}/0", "lease_s": LEASE_S, "deadline_s": 5.0}
        config: Json = config_of(f"vllm@{fake.url}", store=store, unisono={"shutdown_grace_s": 30})
        replicas = [Replica(tmp_path / name, config) for name in "ab"]
        for one in replicas:
            stack.push_async_callback(one.end)
        await asyncio.gather(*(one.start() for one in replicas))
        session = await stack.enter_async_context(
            # A connection each, kept where the gateway keeps it; nothing is asked twice.
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120))
        )
        balancer = Balancer(session, replicas)
        url = await stack.enter_async_context(balancer.running())
        client = Client(url, session)
        over = asyncio.Event()
        told: list[Told] = []

        async def listen_on(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            while not over.is_set():
                told.append(await listened(client))

        listening = [asyncio.create_task(listen_on(6.0 * number / STREAMS)) for number in range(STREAMS)]
        await asyncio.sleep(6)
        begun = []
        for number in range(BACKGROUND):
            key = {"Idempotency_Key": f"once-{number}"}
            body = {"model": "gpt-oss", "input": f"Hi {number}", "background": True}
            begun.append((await client.post("/v1/responses", body, **key))["id"])
        for one in replicas:
            await restarted(one, balancer)
        over.set()
        await asyncio.gather(*listening)
        ended = [await client.over(response_id, within_s=60) for response_id in begun]
        again = [
            (
                await client.post(
                    "/v1/responses",
                    {"model": "gpt-oss", "input": f"Hi {number}", "background": True},
                    Idempotency_Key=f"once-{number}",
                )
            )["id"]
            for number in range(BACKGROUND)
        ]
    assert balancer.refused == 0
    assert len(told) >= 2 * STREAMS
    for each in told:
        assert each.done
        response = fold(each.events).response
        assert (response["status"], response["output"][-1]["content"][0]["text"].strip()) == ("completed", TEXT)
    for response in ended:
        assert (response["status"], response["output"][-1]["content"][0]["text"].strip()) == ("completed", TEXT)
    assert again == begun


def rest_of(asked: dict[str, Any]) -> list[int]:
    """The answer behind what of it stands in the prompt already."""
    prompt = asked["prompt"]
    said = next(count for count in range(len(ANSWER), -1, -1) if prompt[len(prompt) - count :] == ANSWER[:count])
    return list(ANSWER[said:])
