"""A gateway that dies in the middle of a background response: another one finishes it, from the last token that was
kept, and whoever was told of the response gets all of it, exactly once."""

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
from unisono.store.redis import RedisStore, lease_scripts

OTHERS = (
    b"GET",
    b"XRANGE",
    b"HELLO",
    b"CLIENT",
    b"PING",
    b"EXISTS",
    b"SUBSCRIBE",
    b"UNSUBSCRIBE",
    lease_scripts.LAPSED.sha.encode(),
)
"""Commands that have to do with no response, or read its log for a client."""
QUESTION = "Count for me, please."
ITEM_TYPES = ["message", "reasoning", "message"]


DATABASES = itertools.count()


@dataclass
class Scene:
    """A process that is to die, another gateway on the same state, and the model behind both."""

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
    """When the process dies: at the `number`th command it sends to the store, or chunk it gets from the backend."""

    what: str
    number: int
    after: bool

    def __str__(self) -> str:
        return f"{'after' if self.after else 'before'} {self.what} {self.number}"


@asynccontextmanager
async def scene(folder: Path, server: Server, point: Point | None = None, **model: int | float) -> AsyncIterator[Scene]:
    database = next(DATABASES)
    said = Model(**model)  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeVllm(script=said.script))
        here: list[Scene] = []
        waiting = False

        def command(unit: bytes) -> bool:
            nonlocal waiting
            if not here or not here[0].armed or any(b"\n%b\r" % other in unit[:80] for other in OTHERS):
                return True
            here[0].commands += 1
            if point is not None and point.what == "command" and here[0].commands == point.number:
                if not point.after:
                    here[0].kill()
                    return False
                waiting = True
            return True

        def reply(unit: bytes) -> bool:
            if waiting:
                here[0].kill()
            return not waiting

        def chunk(unit: bytes) -> bool:
            if not here or not here[0].armed or b"data: {" not in unit:
                return True
            here[0].chunks += 1
            if point is not None and point.what == "chunk" and here[0].chunks == point.number:
                if not point.after:
                    here[0].kill()
                    return False
                asyncio.get_running_loop().call_later(0.05, here[0].kill)
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
        other = config_of(f"vllm@{fake.url}", store={"url": url, **settings}, unisono={"current_date": "2026-11-20"})
        first = await stack.enter_async_context(replica(folder, config))
        second = await stack.enter_async_context(gateway(other))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        store = RedisStore(url, Retention(), deadline_s=5.0)
        stack.push_async_callback(store.aclose)
        here.append(Scene(first, Client(first.url, session), Client(second.url, session), fake, said, store))
        yield here[0]


def anything(buffer: bytearray) -> bytes | None:
    unit = bytes(buffer)
    buffer.clear()
    return unit or None


async def check_told(scene: Scene, told: Told, kept: Json) -> None:
    """What was told is gapless, whole, and what is kept."""
    folded = fold(told.events)
    assert folded.response == kept
    assert kept["status"] == "completed"
    assert kept["output"][-1]["content"][0]["text"] == scene.model.text


async def dies(scene: Scene) -> float:
    """One background response whose process dies meanwhile; how long after that it was over, 0 when it did not die."""
    conversation = (await scene.b.post("/v1/conversations"))["id"]
    scene.armed = True
    told = Told()
    body = {"model": "gpt-oss", "input": QUESTION, "background": True, "stream": True, "conversation": conversation}
    try:
        await scene.a.listens(told, "/v1/responses", body)
    except aiohttp.ClientError:
        assert scene.killed_at, scene.first.log
    tokens: Tokens = ()
    if told.id:
        tokens = await scene.store.tokens(LOCAL_TENANT, told.id)
        await scene.b.resumes(told, told.id)
        kept = await scene.b.get(f"/v1/responses/{told.id}")
        await check_told(scene, told, kept)
        again = await scene.b.resumes(Told(), told.id)
        assert again.raw == told.raw
    took = asyncio.get_running_loop().time() - scene.killed_at if scene.killed_at else 0.0
    await check_conversation(scene, conversation, promised=bool(told.id))
    check_prompts(scene, tokens)
    return took


async def check_conversation(scene: Scene, conversation: str, *, promised: bool) -> None:
    """Its items are in it once, or, where nothing was promised, perhaps not at all; and it can be gone on with."""
    async with asyncio.timeout(20):
        while True:
            status, answer = await scene.b.asks(
                "POST", "/v1/responses", {"model": "gpt-oss", "input": "Again.", "conversation": conversation}
            )
            if status == 200:
                break
            # Held until the lease of whoever died ends.
            assert status == 409, answer
            await asyncio.sleep(0.1)
    items = (await scene.b.get(f"/v1/conversations/{conversation}/items?order=asc&limit=100"))["data"]
    types = [item["type"] for item in items]
    assert types in ([ITEM_TYPES * 2] if promised else [ITEM_TYPES, ITEM_TYPES * 2])
    assert len({item["id"] for item in items}) == len(items)


def check_prompts(scene: Scene, tokens: Tokens) -> None:
    """The next owner went on behind what was kept, and not from the beginning."""
    prompts = [prompt for prompt in prompts_about(scene.fake, QUESTION) if not prompts_about_again(prompt)]
    for prompt in prompts[1:]:
        assert prompt[: len(prompts[0])] == prompts[0]
    # On a machine that is very busy it may have lost its lease before it died.
    if len(prompts) > 1 and "owned by another process" not in scene.first.log:
        assert prompts[1] == [*prompts[0], *tokens]
        assert list(tokens) == scene.model.answer[: len(tokens)]


def prompts_about_again(prompt: list[int]) -> bool:
    return "Again." in ENCODING.decode(prompt)


SAMPLE = (
    *(Point("command", number, after) for number, after in ((6, True), (9, True), (14, False))),
    *(Point("chunk", number, after) for number, after in ((1, False), (9, True), (20, True))),
)
AT_ONCE = 4


async def at(point: Point, folder: Path, server: Server, places: asyncio.Semaphore) -> float:
    async with places, scene(folder / str(point).replace(" ", "-"), server, point) as here:
        try:
            return await dies(here)
        except BaseException as error:
            error.add_note(f"the process died {point}; {here.first.log[-2000:]}")
            raise


@pytest.mark.slow
async def test_another_process_finishes_it(tmp_path: Path, redis_server: Server) -> None:
    took = await together(SAMPLE, tmp_path, redis_server)
    assert all(took), "a process that did not die"


async def together(points: Sequence[Point], folder: Path, server: Server) -> list[float]:
    places = asyncio.Semaphore(AT_ONCE)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(at(point, folder, server, places)) for point in points]
    return [task.result() for task in tasks]


async def every(what: str, after: bool, folder: Path, server: Server) -> list[float]:
    """Die at every point there is, until one is behind the end."""
    took: list[float] = []
    for first in itertools.count(1, AT_ONCE):
        points = [Point(what, number, after) for number in range(first, first + AT_ONCE)]
        took += await together(points, folder, server)
        if not all(took):
            return took
    raise AssertionError("there is no end")


@pytest.mark.slow
async def test_the_only_process_goes_on_when_it_is_back(tmp_path: Path) -> None:
    """On a file of its own: nobody takes over, but it starts again."""
    model = Model(delay_s=0.03)
    async with FakeVllm(script=model.script) as fake, aiohttp.ClientSession() as session:
        store = {"url": f"sqlite:///{str(tmp_path).removeprefix('/')}/state.db", "lease_s": LEASE_S}
        config = config_of(f"vllm@{fake.url}", store=store, unisono={"current_date": "2026-11-20"})
        told = Told()
        async with replica(tmp_path, config) as first:
            client = Client(first.url, session)
            talk = (await client.post("/v1/conversations"))["id"]
            body: Json = {"model": "gpt-oss", "input": QUESTION, "background": True, "conversation": talk}
            await client.listens(told, "/v1/responses", {**body, "stream": True}, until=25)
            first.kill()
            await first.ended()
        async with replica(tmp_path, config) as second:
            client = Client(second.url, session)
            await client.resumes(told, told.id)
            kept = await client.get(f"/v1/responses/{told.id}")
            assert fold(told.events).response == kept
            assert kept["output"][-1]["content"][0]["text"] == model.text
            items = (await client.get(f"/v1/conversations/{talk}/items?order=asc"))["data"]
            assert [item["type"] for item in items] == ITEM_TYPES
            before, after = prompts_about(fake, QUESTION)
            assert after[: len(before)] == before
            assert len(after) - len(before) >= 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("what", ["command", "chunk"])
async def test_another_process_finishes_it_wherever_the_first_died(
    tmp_path: Path, redis_server: Server, what: str, after: bool
) -> None:
    took = await every(what, after, tmp_path, redis_server)
    died = [each for each in took if each]
    assert len(died) > 15
    assert max(died) < 30
