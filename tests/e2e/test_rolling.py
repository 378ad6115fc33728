"""Rolling restart of the replicas under load: no client is affected."""

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
# Interval between readiness requests of the balancer.
READINESS_INTERVAL_S = 0.5


@dataclass
class Balancer:
    """A balancer that forwards each connection to one of the ready replicas in turn."""

    session: aiohttp.ClientSession
    replicas: list[Replica]
    ready: set[str] = field(default_factory=set)
    # Number of connections that no replica accepted.
    refused: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        turns = itertools.count()
        ready = asyncio.Event()

        async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            urls = sorted(self.ready)
            port = int(urls[next(turns) % len(urls)].rpartition(":")[2])
            try:
                async with connected(port) as (replica_reader, replica_writer):
                    await asyncio.gather(forward(reader, replica_writer), forward(replica_reader, writer))
            except OSError:
                self.refused += 1
                writer.transport.abort()

        tasks = [asyncio.create_task(self._watch(replica_, ready)) for replica_ in self.replicas]
        try:
            async with listening(on_connection) as listener:
                await ready.wait()
                yield listener.url
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, replica: Replica, ready: asyncio.Event) -> None:
        known = ""
        while True:
            with suppress(aiohttp.ClientError):
                known = known or replica.url
                async with self.session.get(f"{replica.url}/health/readiness") as response:
                    (self.ready.add if response.status == 200 else self.ready.discard)(replica.url)
                    if response.status == 200:
                        ready.set()
            await asyncio.sleep(READINESS_INTERVAL_S)


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with suppress(OSError):
        writer.close()


async def stream_response(client: Client) -> Told:
    body = {"model": "gpt-oss", "input": "Hi", "stream": True, "store": False}
    return await client.listens(Told(), "/v1/responses", body)


async def restart(replica_: Replica, balancer: Balancer) -> None:
    replica_.signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        assert await replica_.ended() == 0
    assert replica_.url not in balancer.ready
    replica_.url = ""
    await replica_.start()
    async with asyncio.timeout(30):
        while replica_.url not in balancer.ready:
            await asyncio.sleep(0.05)


async def test_a_rolling_restart_affects_no_client(tmp_path: Path) -> None:
    redis = Server(tmp_path, ("appendonly yes",)).start()
    async with AsyncExitStack() as stack:
        stack.callback(redis.end)

        def script(request: dict[str, Any]) -> VllmScript:
            return VllmScript(tokens=rest_of_answer(request), per_chunk=1, delay_s=0.1)

        fake = await stack.enter_async_context(FakeVllm(script=script))
        store = {"url": f"redis://127.0.0.1:{redis.port}/0", "lease_s": LEASE_S, "deadline_s": 5.0}
        config: Json = config_of(f"vllm@{fake.url}", store=store, unisono={"shutdown_grace_s": 30})
        replicas = [Replica(tmp_path / name, config) for name in "ab"]
        for replica_ in replicas:
            stack.push_async_callback(replica_.end)
        await asyncio.gather(*(replica_.start() for replica_ in replicas))
        session = await stack.enter_async_context(
            # One connection per request, kept as long as the gateway keeps it; requests are not retried.
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120))
        )
        balancer = Balancer(session, replicas)
        url = await stack.enter_async_context(balancer.running())
        client = Client(url, session)
        is_over = asyncio.Event()
        streams: list[Told] = []

        async def stream_repeatedly(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            while not is_over.is_set():
                streams.append(await stream_response(client))

        tasks = [asyncio.create_task(stream_repeatedly(6.0 * number / STREAMS)) for number in range(STREAMS)]
        await asyncio.sleep(6)
        background_ids = []
        for number in range(BACKGROUND):
            key = {"Idempotency_Key": f"once-{number}"}
            body = {"model": "gpt-oss", "input": f"Hi {number}", "background": True}
            background_ids.append((await client.post("/v1/responses", body, **key))["id"])
        for replica_ in replicas:
            await restart(replica_, balancer)
        is_over.set()
        await asyncio.gather(*tasks)
        responses = [await client.over(response_id, within_s=60) for response_id in background_ids]
        repeated_ids = [
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
    assert len(streams) >= 2 * STREAMS
    for stream in streams:
        assert stream.done
        response = fold(stream.events).response
        assert (response["status"], response["output"][-1]["content"][0]["text"].strip()) == ("completed", TEXT)
    for response in responses:
        assert (response["status"], response["output"][-1]["content"][0]["text"].strip()) == ("completed", TEXT)
    assert repeated_ids == background_ids


def rest_of_answer(request: dict[str, Any]) -> list[int]:
    """Return the tokens of the answer that are not in the prompt yet."""
    prompt = request["prompt"]
    given_count = next(count for count in range(len(ANSWER), -1, -1) if prompt[len(prompt) - count :] == ANSWER[:count])
    return list(ANSWER[given_count:])
