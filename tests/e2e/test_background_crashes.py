"""A gateway crashes during a background response, and another one finishes it.

It continues after the last stored token. A client that knows the response gets all of its events exactly once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests.api.responses.folding import fold
from tests.contract.servers import Server
from tests.e2e.continuing import Model, prompts_about
from tests.e2e.gateway import config_of, gateway
from tests.e2e.replicas import LEASE_S, Client, Json, Relay, Replica, Told, one_chunk, one_command, replica
from tests.e2e.wires import ENCODING
from tests.fakes import FakeVllm
from unisono.core.access import LOCAL_TENANT
from unisono.core.conversation import Tokens
from unisono.core.state_store import Retention
from unisono.store.redis import RedisStore
from unisono.store.redis.leases import LAPSED

# Commands that belong to no response, or that read its log for a client.
OTHERS = (
    b"GET",
    b"XRANGE",
    b"HELLO",
    b"CLIENT",
    b"PING",
    b"EXISTS",
    b"SUBSCRIBE",
    b"UNSUBSCRIBE",
    LAPSED.sha.encode(),
)
QUESTION = "Count for me, please."
ITEM_TYPES = ["message", "reasoning", "message"]


DATABASES = itertools.count()


@dataclass
class Scene:
    """A gateway process that will crash, another gateway on the same store, and their model."""

    first: Replica
    a: Client
    b: Client
    fake: FakeVllm
    model: Model
    store: RedisStore
    armed: bool = False
    commands: int = 0
    chunks: int = 0
    killed_at: float = 0.0

    def kill(self) -> None:
        if not self.killed_at:
            self.killed_at = asyncio.get_running_loop().time()
            self.first.kill()


@dataclass(frozen=True)
class Point:
    """Time of the crash: the `number`th command to the store or chunk from the backend."""

    what: str
    number: int
    after: bool

    def __str__(self) -> str:
        return f"{'after' if self.after else 'before'} {self.what} {self.number}"


@asynccontextmanager
async def scene(folder: Path, server: Server, point: Point | None = None, **model: int | float) -> AsyncIterator[Scene]:
    database = next(DATABASES)
    scripted_model = Model(**model)  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeVllm(script=scripted_model.script))
        scenes: list[Scene] = []
        waiting = False

        def command(unit: bytes) -> bool:
            nonlocal waiting
            if not scenes or not scenes[0].armed or any(b"\n%b\r" % name in unit[:80] for name in OTHERS):
                return True
            scenes[0].commands += 1
            if point is not None and point.what == "command" and scenes[0].commands == point.number:
                if not point.after:
                    scenes[0].kill()
                    return False
                waiting = True
            return True

        def reply(unit: bytes) -> bool:
            if waiting:
                scenes[0].kill()
            return not waiting

        def chunk(unit: bytes) -> bool:
            if not scenes or not scenes[0].armed or b"data: {" not in unit:
                return True
            scenes[0].chunks += 1
            if point is not None and point.what == "chunk" and scenes[0].chunks == point.number:
                if not point.after:
                    scenes[0].kill()
                    return False
                asyncio.get_running_loop().call_later(0.05, scenes[0].kill)
            return True

        to_store = await stack.enter_async_context(
            Relay(server.port, cut_up=one_command, up=command, cut_down=anything, down=reply)
        )
        to_model = await stack.enter_async_context(Relay(fake.port, cut_down=one_chunk, down=chunk))
        settings = {"lease_s": LEASE_S, "deadline_s": 2.0}
        config = config_of(
            f"vllm@http://127.0.0.1:{to_model.port}",
            store={"url": f"redis://127.0.0.1:{to_store.port}/{database}", **settings},
            unisono={"current_date": "2026-11-20"},
        )
        url = f"redis://127.0.0.1:{server.port}/{database}"
        second_config = config_of(
            f"vllm@{fake.url}", store={"url": url, **settings}, unisono={"current_date": "2026-11-20"}
        )
        first = await stack.enter_async_context(replica(folder, config))
        second = await stack.enter_async_context(gateway(second_config))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        store = RedisStore(url, Retention(), deadline_s=5.0)
        stack.push_async_callback(store.aclose)
        scenes.append(
            Scene(first, Client(first.url, session), Client(second.url, session), fake, scripted_model, store)
        )
        yield scenes[0]


def anything(buffer: bytearray) -> bytes | None:
    unit = bytes(buffer)
    buffer.clear()
    return unit or None


async def check_events(scene: Scene, received: Told, stored: Json) -> None:
    """Check that the events are complete and fold to the stored response."""
    folded = fold(received.events)
    assert folded.response == stored
    assert stored["status"] == "completed"
    assert stored["output"][-1]["content"][0]["text"] == scene.model.text


async def crash(scene: Scene) -> float:
    """Run one background response and crash its process.

    Returns the seconds from the crash to the end of the response, or 0 if the process did not crash.
    """
    conversation = (await scene.b.post("/v1/conversations"))["id"]
    scene.armed = True
    received = Told()
    body = {"model": "gpt-oss", "input": QUESTION, "background": True, "stream": True, "conversation": conversation}
    try:
        await scene.a.listens(received, "/v1/responses", body)
    except aiohttp.ClientError:
        assert scene.killed_at, scene.first.log
    tokens: Tokens = ()
    if received.id:
        tokens = await scene.store.tokens(LOCAL_TENANT, received.id)
        await scene.b.resumes(received, received.id)
        stored = await scene.b.get(f"/v1/responses/{received.id}")
        await check_events(scene, received, stored)
        repeated = await scene.b.resumes(Told(), received.id)
        assert repeated.raw == received.raw
    took = asyncio.get_running_loop().time() - scene.killed_at if scene.killed_at else 0.0
    await check_conversation(scene, conversation, promised=bool(received.id))
    check_prompts(scene, tokens)
    return took


async def check_conversation(scene: Scene, conversation: str, *, promised: bool) -> None:
    """Check that the conversation has every item once and can be continued.

    Without `promised`, the client never got the id of the response, and its items may be missing.
    """
    async with asyncio.timeout(20):
        while True:
            status, answer = await scene.b.asks(
                "POST", "/v1/responses", {"model": "gpt-oss", "input": "Again.", "conversation": conversation}
            )
            if status == 200:
                break
            # The conversation is locked until the lease of the crashed process expires.
            assert status == 409, answer
            await asyncio.sleep(0.1)
    items = (await scene.b.get(f"/v1/conversations/{conversation}/items?order=asc&limit=100"))["data"]
    types = [item["type"] for item in items]
    assert types in ([ITEM_TYPES * 2] if promised else [ITEM_TYPES, ITEM_TYPES * 2])
    assert len({item["id"] for item in items}) == len(items)


def check_prompts(scene: Scene, tokens: Tokens) -> None:
    """Check that the next owner continued after the stored tokens."""
    prompts = [prompt for prompt in prompts_about(scene.fake, QUESTION) if not prompts_about_again(prompt)]
    for prompt in prompts[1:]:
        assert prompt[: len(prompts[0])] == prompts[0]
    # On a very busy machine, the first owner may have lost its lease before the crash.
    if len(prompts) > 1 and "owned by another process" not in scene.first.log:
        assert prompts[1] == [*prompts[0], *tokens]
        assert list(tokens) == scene.model.answer[: len(tokens)]


def prompts_about_again(prompt: list[int]) -> bool:
    return "Again." in ENCODING.decode(prompt)


SAMPLE = (
    *(Point("command", number, after) for number, after in ((6, True), (9, True), (14, False))),
    *(Point("chunk", number, after) for number, after in ((1, False), (9, True), (20, True))),
)
CONCURRENCY = 4


async def crash_at(point: Point, folder: Path, server: Server, semaphore: asyncio.Semaphore) -> float:
    async with semaphore, scene(folder / str(point).replace(" ", "-"), server, point) as current:
        try:
            return await crash(current)
        except BaseException as error:
            error.add_note(f"the process crashed {point}; {current.first.log[-2000:]}")
            raise


@pytest.mark.slow
async def test_another_process_finishes_the_response_after_a_crash(tmp_path: Path, redis_server: Server) -> None:
    took = await together(SAMPLE, tmp_path, redis_server)
    assert all(took), "a process did not crash"


async def together(points: Sequence[Point], folder: Path, server: Server) -> list[float]:
    semaphore = asyncio.Semaphore(CONCURRENCY)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(crash_at(point, folder, server, semaphore)) for point in points]
    return [task.result() for task in tasks]


async def crash_at_every_point(what: str, after: bool, folder: Path, server: Server) -> list[float]:
    """Crash at every point until one lies after the end of the response."""
    took: list[float] = []
    for first in itertools.count(1, CONCURRENCY):
        points = [Point(what, number, after) for number in range(first, first + CONCURRENCY)]
        took += await together(points, folder, server)
        if not all(took):
            return took
    raise AssertionError("the response has no end")


@pytest.mark.slow
async def test_restarted_process_resumes_its_own_response(tmp_path: Path) -> None:
    """The store is a local file, so the response waits until the process is restarted."""
    model = Model(delay_s=0.03)
    async with FakeVllm(script=model.script) as fake, aiohttp.ClientSession() as session:
        store = {"url": f"sqlite:///{str(tmp_path).removeprefix('/')}/state.db", "lease_s": LEASE_S}
        config = config_of(f"vllm@{fake.url}", store=store, unisono={"current_date": "2026-11-20"})
        received = Told()
        async with replica(tmp_path, config) as first:
            client = Client(first.url, session)
            conversation = (await client.post("/v1/conversations"))["id"]
            body: Json = {"model": "gpt-oss", "input": QUESTION, "background": True, "conversation": conversation}
            await client.listens(received, "/v1/responses", {**body, "stream": True}, until=25)
            first.kill()
            await first.ended()
        async with replica(tmp_path, config) as second:
            client = Client(second.url, session)
            await client.resumes(received, received.id)
            stored = await client.get(f"/v1/responses/{received.id}")
            assert fold(received.events).response == stored
            assert stored["output"][-1]["content"][0]["text"] == model.text
            items = (await client.get(f"/v1/conversations/{conversation}/items?order=asc"))["data"]
            assert [item["type"] for item in items] == ITEM_TYPES
            before, after = prompts_about(fake, QUESTION)
            assert after[: len(before)] == before
            assert len(after) - len(before) >= 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("what", ["command", "chunk"])
async def test_another_process_finishes_the_response_after_a_crash_at_any_point(
    tmp_path: Path, redis_server: Server, what: str, after: bool
) -> None:
    took = await crash_at_every_point(what, after, tmp_path, redis_server)
    crashed = [each for each in took if each]
    assert len(crashed) > 15
    assert max(crashed) < 30
