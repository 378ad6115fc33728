"""A client that reads slowly slows its backend down, whatever is between them; one that reads nothing is cut off. In
both cases the gateway holds next to nothing of what the backend has to say."""

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
OFFERED = 100 * MB
MOST_HELD = 2 * MB
"""Of the gateway's memory, for each stream."""
UNREAD_STREAMS = 60
MAX_UNREAD_BYTES = 768 * KB
"""Of the gateway's memory, for each stream that a client does not read."""
MOST_TAKEN = 2 * MB
"""Of a backend's answer, the buffers of the system on both ends included."""
AT_ONCE_S = 1.0
"""250 ms is the promise, and what an idle machine needs is a few; the rest is for a busy one."""
WRITE_TIMEOUT_S = 0.6

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "sigma")
WORDS = random.Random(7).choices(NAMES, k=40_000)


def answer(words: int) -> str:
    return "<|channel|>final<|message|>" + " ".join(WORDS[:words]) + "<|return|>"


LONG = answer(20_000)
SHORT = "<|channel|>final<|message|>Hello there.<|return|>"

pytestmark = pytest.mark.asyncio(loop_scope="module")


def scripted(kind: Kind, said: str, *, tokens_per_event: int = 32, **fields: Any) -> Any:
    script = kind.script(said)
    characters = 1 if hasattr(script, "tokens") else 5
    return replace(script, per_chunk=characters * tokens_per_event, **fields)


@dataclass
class Site:
    """A gateway process in front of a backend of one kind."""

    kind: Kind
    fake: Any
    replica: Replica
    client: Client

    def say(self, script: Any) -> None:
        self.fake.script = lambda asked: script
        self.fake.requests.clear()

    @property
    def generations(self) -> Sequence[Seen]:
        return [seen for seen in self.fake.requests if not seen.is_probe]

    @property
    def pid(self) -> int:
        assert self.replica.process is not None
        return self.replica.process.pid

    async def warm(self) -> None:
        """Have it do everything once, so that what it needs for that is there."""
        self.say(scripted(self.kind, SHORT, tokens_per_event=1))
        body: dict[str, Any] = {"model": "gpt-oss", "stream": True}
        asking = [
            ("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "Hi"}]}),
            ("/v1/responses", {**body, "input": "Hi", "store": False}),
        ]
        for path, asked in asking * 3:
            await asyncio.gather(*(self.client.listens(Told(), path, asked) for _ in range(STREAMS)))

    async def still(self, count: int, within_s: float = 10.0) -> list[int]:
        """Wait until the backend could write nothing for a while; how much went out until then, for each answer."""
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
            here = Site(kind, fake, running, Client(running.url, session))
            await here.warm()
            yield here


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["vllm", "sglang", "llamacpp", "ollama", "mlx_server"]
)
async def flooded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site(KINDS[request.param], tmp_path_factory.mktemp("gateway")) as here:
        yield here


@pytest.mark.slow
@pytest.mark.parametrize("surface", SURFACES)
async def test_a_client_that_reads_slowly_slows_its_backend_down(flooded: Site, surface: str) -> None:
    before = holdings(flooded.pid)
    flooded.say(scripted(flooded.kind, LONG, faults=(flood_from(8, OFFERED),)))
    clients = [(await SURFACES[surface](flooded.replica.url)).drips() for _ in range(STREAMS)]
    poured = await flooded.still(STREAMS)
    assert max(poured) < MOST_TAKEN
    assert holdings(flooded.pid).memory - before.memory < STREAMS * MOST_HELD
    left = asyncio.get_running_loop().time()
    for client in clients:
        await client.end()
    for index in range(STREAMS):
        assert await flooded.fake.gone(index) - left < AT_ONCE_S
    async with asyncio.timeout(5):
        while holdings(flooded.pid).descriptors > before.descriptors:
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("tokens_per_event", [1, 32])
@pytest.mark.parametrize("surface", SURFACES)
async def test_an_unread_stream_holds_little_memory(tmp_path: Path, surface: str, tokens_per_event: int) -> None:
    """Of many streams, so that the memory that the process needs anyway does not count."""
    async with site(KINDS["vllm"], tmp_path, unisono={"write_timeout_s": 600}) as here:
        flood = scripted(here.kind, LONG, tokens_per_event=tokens_per_event, faults=(flood_from(8, OFFERED),))
        here.say(flood)
        clients = [await SURFACES[surface](here.replica.url) for _ in range(STREAMS)]
        await here.still(STREAMS)
        before = holdings(here.pid)
        clients += [await SURFACES[surface](here.replica.url) for _ in range(UNREAD_STREAMS)]
        await here.still(STREAMS + UNREAD_STREAMS, within_s=90.0)
        held = (holdings(here.pid).memory - before.memory) / UNREAD_STREAMS
        print(f"{surface}, {tokens_per_event} tokens per event: {held / KB:.0f} KiB")
        assert held < MAX_UNREAD_BYTES
        for client in clients:
            await client.end()


@pytest.mark.slow
async def test_a_log_is_read_as_fast_as_its_reader_reads(tmp_path: Path) -> None:
    async with site(KINDS["vllm"], tmp_path) as here:
        here.say(scripted(here.kind, answer(len(WORDS))))
        made = await here.client.post("/v1/responses", {"model": "gpt-oss", "input": "Hi", "background": True})
        done = await here.client.over(made["id"])
        assert done["status"] == "completed"
        told = await here.client.resumes(Told(), made["id"])
        assert sum(map(len, told.raw)) > MB
        path = f"/v1/responses/{made['id']}?stream=true"
        readers = []
        memory = []
        for _ in range(4 * STREAMS):
            # One behind the other: finding the response costs more, for a moment, than its log ever does.
            readers.append((await over_http(here.replica.url, request("GET", path))).drips())
            await asyncio.sleep(0.1)
            memory.append(holdings(here.pid).memory)
        assert (memory[-1] - memory[STREAMS - 1]) / (3 * STREAMS) < MOST_HELD
        for reader in readers:
            await reader.end()


# -- clients that read nothing


@asynccontextmanager
async def impatient(fake: Any, kind: Kind) -> AsyncIterator[Gateway]:
    """A gateway that gives clients little time to take what they are sent."""
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
async def test_a_client_that_reads_nothing_is_cut_off_and_its_backend_freed(
    stuck_at: tuple[Any, Gateway], surface: str
) -> None:
    fake, running = stuck_at
    fake.requests.clear()
    flood = scripted(KINDS["vllm"], LONG, faults=(flood_from(8, OFFERED),))
    fake.script = lambda asked: flood
    client: SlowClient = await SURFACES[surface](running.url)
    await fake.asked()
    began = asyncio.get_running_loop().time()
    await client.cut_off(within_s=5 * WRITE_TIMEOUT_S)
    cut = asyncio.get_running_loop().time()
    assert cut - began > WRITE_TIMEOUT_S / 2
    assert await fake.gone() - cut < AT_ONCE_S
    await client.end()


@pytest.mark.slow
async def test_a_response_in_the_background_goes_on_without_a_client_that_reads_nothing(
    stuck_at: tuple[Any, Gateway],
) -> None:
    fake, running = stuck_at
    fake.requests.clear()
    long = scripted(KINDS["vllm"], LONG, delay_s=4 * WRITE_TIMEOUT_S / (20_000 / 32))
    fake.script = lambda asked: long
    client = await SURFACES["responses"](running.url, background=True, store=True)
    await fake.asked()
    heard = b""
    while b'"id":"resp_' not in heard:
        heard += await asyncio.get_running_loop().sock_recv(client.sock, 512)
    heard += await asyncio.get_running_loop().sock_recv(client.sock, 512)
    response_id = "resp_" + heard.partition(b'"id":"resp_')[2].partition(b'"')[0].decode()
    await client.cut_off(within_s=8 * WRITE_TIMEOUT_S)
    await client.end()
    watching = Client(running.url, running.session)
    done = await watching.over(response_id)
    assert done["status"] == "completed"
    assert done["output"][-1]["content"][0]["text"] == " ".join(WORDS[:20_000])
    # So is one that takes nothing of a whole answer, however it was made.
    client = await over_http(running.url, request("GET", f"/v1/responses/{response_id}"))
    await client.cut_off(within_s=5 * WRITE_TIMEOUT_S)
    await client.end()


@pytest.mark.slow
async def test_a_client_that_pauses_for_less_gets_all_of_it(stuck_at: tuple[Any, Gateway]) -> None:
    fake, running = stuck_at
    fake.requests.clear()
    long = scripted(KINDS["vllm"], LONG)
    fake.script = lambda asked: long
    client = await chat(running.url)
    loop = asyncio.get_running_loop()
    heard = b""
    for _ in range(3):
        await asyncio.sleep(WRITE_TIMEOUT_S / 2)
        while len(heard) < 20_000 or b"\n\ndata" not in heard[-2000:]:
            heard += await loop.sock_recv(client.sock, 4096)
    async with asyncio.timeout(10):
        while not heard.endswith(b"0\r\n\r\n"):
            heard += await loop.sock_recv(client.sock, 65536)
    assert b"data: [DONE]\n\n" in heard
    await client.end()
