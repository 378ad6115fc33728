"""Backpressure: a slow client slows down its backend, and one that reads nothing is closed.

In both cases the gateway buffers almost nothing of the backend's output.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import uvicorn

from tests.e2e.gateway import Gateway
from tests.e2e.obeying import KINDS, Kind
from tests.e2e.processes import KB, MB, holdings
from tests.e2e.replicas import Client, Replica, Told, replica
from tests.e2e.slow_clients import SURFACES, SlowClient, chat, over_http, request
from tests.fakes import Seen, flood_from
from unisono.app import build
from unisono.config import parse
from unisono.server.listener import connections
from unisono.server.server import server_config

STREAMS = 6
FLOOD_BYTES = 100 * MB
# Gateway memory per stream.
MAX_GATEWAY_BYTES = 2 * MB
UNREAD_STREAMS = 60
# Gateway memory per stream that its client does not read.
MAX_UNREAD_BYTES = 768 * KB
# Bytes that a backend can send of its answer, including the socket buffers of both ends.
MAX_BACKEND_BYTES = 2 * MB
# The promise is 250 ms, and an idle machine needs a few milliseconds. The rest is for a busy one.
DISCONNECT_LIMIT_S = 1.0
WRITE_TIMEOUT_S = 0.6

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "sigma")
WORDS = random.Random(7).choices(NAMES, k=40_000)


def answer(words: int) -> str:
    return "<|channel|>final<|message|>" + " ".join(WORDS[:words]) + "<|return|>"


LONG = answer(20_000)
# A flood repeats it. The fake backend builds all events of an answer at its start, which takes seconds for a long one.
REPEATED = answer(2_000)
SHORT = "<|channel|>final<|message|>Hello there.<|return|>"

pytestmark = pytest.mark.asyncio(loop_scope="module")


def scripted(kind: Kind, text: str, *, tokens_per_event: int = 32, **fields: Any) -> Any:
    script = kind.script(text)
    characters = 1 if hasattr(script, "tokens") else 5
    return replace(script, per_chunk=characters * tokens_per_event, **fields)


@dataclass
class Site:
    """A gateway process with a backend of one kind."""

    kind: Kind
    fake: Any
    replica: Replica
    client: Client

    def say(self, script: Any) -> None:
        self.fake.script = lambda _: script
        self.fake.requests.clear()

    @property
    def generations(self) -> Sequence[Seen]:
        return [seen for seen in self.fake.requests if not seen.is_probe]

    @property
    def pid(self) -> int:
        assert self.replica.process is not None
        return self.replica.process.pid

    async def warm(self) -> None:
        """Use every code path once, so that later memory growth is not its setup."""
        self.say(scripted(self.kind, SHORT, tokens_per_event=1))
        body: dict[str, Any] = {"model": "gpt-oss", "stream": True}
        requests = [
            ("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "Hi"}]}),
            ("/v1/responses", {**body, "input": "Hi", "store": False}),
        ]
        for path, fields in requests * 3:
            await asyncio.gather(*(self.client.listens(Told(), path, fields) for _ in range(STREAMS)))

    async def still(self, count: int, within_s: float = 10.0) -> list[int]:
        """Wait until the backend cannot send more; return the bytes sent per answer."""
        async with asyncio.timeout(within_s):
            await self.fake.asked(count, within_s)
            poured: list[int] = []
            while poured != (poured := [seen.poured for seen in self.generations]) or not all(poured):
                await asyncio.sleep(0.4)
        return poured


@asynccontextmanager
async def site(kind: Kind, folder: Path, **sections: Any) -> AsyncIterator[Site]:
    async with kind.fake() as fake:
        fake.send_buffer = 128 * 1024
        entry = {"model": f"{kind.name}/tiny", "api_base": fake.url}
        config = {
            "model_list": [{"model_name": "gpt-oss", "litellm_params": entry}],
            "store": {"url": f"sqlite://{folder}/state.db"},
            **sections,
        }
        async with replica(folder, config) as running, aiohttp.ClientSession() as session:
            harness = Site(kind, fake, running, Client(running.url, session))
            await harness.warm()
            yield harness


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["vllm", "sglang", "llamacpp", "ollama", "mlx_server"]
)
async def flooded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site(KINDS[request.param], tmp_path_factory.mktemp("gateway")) as harness:
        yield harness


@pytest.mark.slow
@pytest.mark.parametrize("surface", SURFACES)
async def test_slow_client_slows_down_its_backend(flooded: Site, surface: str) -> None:
    before = holdings(flooded.pid)
    flooded.say(scripted(flooded.kind, LONG, faults=(flood_from(8, FLOOD_BYTES),)))
    clients = [(await SURFACES[surface](flooded.replica.url)).drips() for _ in range(STREAMS)]
    poured = await flooded.still(STREAMS)
    assert max(poured) < MAX_BACKEND_BYTES
    assert holdings(flooded.pid).memory - before.memory < STREAMS * MAX_GATEWAY_BYTES
    closed = asyncio.get_running_loop().time()
    for client in clients:
        await client.end()
    for index in range(STREAMS):
        assert await flooded.fake.gone(index) - closed < DISCONNECT_LIMIT_S
    async with asyncio.timeout(5):
        while holdings(flooded.pid).descriptors > before.descriptors:
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("tokens_per_event", [1, 32])
@pytest.mark.parametrize("surface", SURFACES)
async def test_unread_stream_uses_little_memory(tmp_path: Path, surface: str, tokens_per_event: int) -> None:
    """Many streams make the base memory of the process negligible."""
    async with site(KINDS["vllm"], tmp_path, unisono={"write_timeout_s": 600}) as harness:
        flood = scripted(
            harness.kind, REPEATED, tokens_per_event=tokens_per_event, faults=(flood_from(8, FLOOD_BYTES),)
        )
        harness.say(flood)
        clients = [await SURFACES[surface](harness.replica.url) for _ in range(STREAMS)]
        await harness.still(STREAMS)
        before = holdings(harness.pid)
        clients += [await SURFACES[surface](harness.replica.url) for _ in range(UNREAD_STREAMS)]
        await harness.still(STREAMS + UNREAD_STREAMS, within_s=90.0)
        bytes_per_stream = (holdings(harness.pid).memory - before.memory) / UNREAD_STREAMS
        print(f"{surface}, {tokens_per_event} tokens per event: {bytes_per_stream / KB:.0f} KiB")
        assert bytes_per_stream < MAX_UNREAD_BYTES
        for client in clients:
            await client.end()


@pytest.mark.slow
async def test_event_log_is_streamed_at_the_speed_of_its_reader(tmp_path: Path) -> None:
    async with site(KINDS["vllm"], tmp_path) as harness:
        harness.say(scripted(harness.kind, answer(len(WORDS))))
        created = await harness.client.post("/v1/responses", {"model": "gpt-oss", "input": "Hi", "background": True})
        done = await harness.client.over(created["id"])
        assert done["status"] == "completed"
        log_stream = await harness.client.resumes(Told(), created["id"])
        assert sum(map(len, log_stream.raw)) > MB
        path = f"/v1/responses/{created['id']}?stream=true"
        readers = []
        memory = []
        for _ in range(4 * STREAMS):
            # One after the other: reading the response briefly costs more memory than streaming its log.
            readers.append((await over_http(harness.replica.url, request("GET", path))).drips())
            await asyncio.sleep(0.1)
            memory.append(holdings(harness.pid).memory)
        assert (memory[-1] - memory[STREAMS - 1]) / (3 * STREAMS) < MAX_GATEWAY_BYTES
        for reader in readers:
            await reader.end()


# -- clients that read nothing


@asynccontextmanager
async def impatient(fake: Any, kind: Kind) -> AsyncIterator[Gateway]:
    """Run a gateway with a short write timeout."""
    entry = {"model": f"{kind.name}/tiny", "api_base": fake.url}
    raw = {
        "model_list": [{"model_name": "gpt-oss", "litellm_params": entry}],
        "store": {"url": "memory://"},
        "unisono": {"write_timeout_s": WRITE_TIMEOUT_S},
    }
    settings = parse(raw, {}).config
    served = server_config(build(settings), settings)
    served.http = connections(settings.unisono.header_timeout_s, write_timeout_s=settings.unisono.write_timeout_s)
    server = uvicorn.Server(served)
    listener = served.bind_socket()
    serving = asyncio.create_task(server._serve([listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        async with aiohttp.ClientSession() as session:
            yield Gateway(f"http://127.0.0.1:{listener.getsockname()[1]}", session)
    finally:
        server.should_exit = True
        await serving
        listener.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stuck_at() -> AsyncIterator[tuple[Any, Gateway]]:
    kind = KINDS["vllm"]
    async with kind.fake() as fake, impatient(fake, kind) as running:
        yield fake, running


@pytest.mark.parametrize("surface", SURFACES)
async def test_unread_connection_is_closed_and_its_backend_freed(stuck_at: tuple[Any, Gateway], surface: str) -> None:
    fake, running = stuck_at
    fake.requests.clear()
    flood = scripted(KINDS["vllm"], LONG, faults=(flood_from(8, FLOOD_BYTES),))
    fake.script = lambda _: flood
    client: SlowClient = await SURFACES[surface](running.url)
    await fake.asked()
    began = asyncio.get_running_loop().time()
    await client.cut_off(within_s=5 * WRITE_TIMEOUT_S)
    cut = asyncio.get_running_loop().time()
    assert cut - began > WRITE_TIMEOUT_S / 2
    assert await fake.gone() - cut < DISCONNECT_LIMIT_S
    await client.end()


@pytest.mark.slow
async def test_background_response_completes_without_its_unreading_client(
    stuck_at: tuple[Any, Gateway],
) -> None:
    fake, running = stuck_at
    fake.requests.clear()
    long = scripted(KINDS["vllm"], LONG, delay_s=4 * WRITE_TIMEOUT_S / (20_000 / 32))
    fake.script = lambda _: long
    client = await SURFACES["responses"](running.url, background=True, store=True)
    await fake.asked()
    received = b""
    while b'"id":"resp_' not in received:
        received += await asyncio.get_running_loop().sock_recv(client.sock, 512)
    received += await asyncio.get_running_loop().sock_recv(client.sock, 512)
    response_id = "resp_" + received.partition(b'"id":"resp_')[2].partition(b'"')[0].decode()
    await client.cut_off(within_s=8 * WRITE_TIMEOUT_S)
    await client.end()
    watcher = Client(running.url, running.session)
    done = await watcher.over(response_id)
    assert done["status"] == "completed"
    assert done["output"][-1]["content"][0]["text"] == " ".join(WORDS[:20_000])
    # A client that reads nothing of a complete answer is closed too.
    client = await over_http(running.url, request("GET", f"/v1/responses/{response_id}"))
    await client.cut_off(within_s=5 * WRITE_TIMEOUT_S)
    await client.end()


@pytest.mark.slow
async def test_client_that_pauses_below_the_write_timeout_gets_everything(stuck_at: tuple[Any, Gateway]) -> None:
    fake, running = stuck_at
    fake.requests.clear()
    long = scripted(KINDS["vllm"], LONG)
    fake.script = lambda _: long
    client = await chat(running.url)
    loop = asyncio.get_running_loop()
    received = b""
    for _ in range(3):
        await asyncio.sleep(WRITE_TIMEOUT_S / 2)
        while len(received) < 20_000 or b"\n\ndata" not in received[-2000:]:
            received += await loop.sock_recv(client.sock, 4096)
    async with asyncio.timeout(10):
        while not received.endswith(b"0\r\n\r\n"):
            received += await loop.sock_recv(client.sock, 65536)
    assert b"data: [DONE]\n\n" in received
    await client.end()
