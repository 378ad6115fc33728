"""Background responses on several replicas: made by one, read, continued, called off and deleted on any."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tests.api.responses.folding import fold
from tests.contract.servers import Server
from tests.e2e.continuing import Model, prompts_about
from tests.e2e.gateway import config_of
from tests.e2e.replicas import LEASE_S, Client, Json, Replica, Told
from tests.e2e.wires import ENCODING
from tests.fakes import FakeVllm
from unisono.core.access import LOCAL_TENANT
from unisono.core.state_store import Retention
from unisono.store.redis import RedisStore

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUICKLY_S = 0.5
"""For what happens in the process that makes a response."""
SOON_S = 2.0
"""For what another process has to find out, with a lease of a second."""


@dataclass
class Pair:
    """Two replicas on one Redis, and one model behind both."""

    first: Replica
    second: Replica
    a: Client
    b: Client
    fake: FakeVllm
    model: Model
    store: RedisStore

    def asks(self, question: str, **fields: object) -> Json:
        return {"model": "gpt-oss", "input": question, "background": True, **fields}

    def speak(self, **model: int | float | bool) -> Model:
        self.model = Model(**model)  # type: ignore[arg-type]
        self.fake.script = self.model.script
        return self.model

    async def at_work(self, question: str, count: int = 1) -> None:
        """Return once the model was asked so often."""
        async with asyncio.timeout(10):
            while len(prompts_about(self.fake, question)) < count:
                await asyncio.sleep(0.005)

    async def left(self, question: str) -> float:
        """When the process that asked the model last dropped the connection."""
        index = max(
            place
            for place, seen in enumerate(self.fake.requests)
            if seen.path == "/v1/completions" and question in ENCODING.decode(seen.json["prompt"])
        )
        return await self.fake.gone(index)


DATABASES = itertools.count()


def config(url: str, fake: FakeVllm) -> Json:
    store = {"url": url, "lease_s": LEASE_S, "deadline_s": 2.0}
    unisono = {"current_date": "2026-11-20", "shutdown_grace_s": 5}
    return config_of(f"vllm@{fake.url}", store=store, unisono=unisono)


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"), ("appendonly yes", "appendfsync always")).start()
    yield server
    server.end()


@asynccontextmanager
async def replicas(folder: Path, server: Server) -> AsyncIterator[Pair]:
    model = Model()
    # What one pair leaves another one would take over.
    url = f"redis://127.0.0.1:{server.port}/{next(DATABASES)}"
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeVllm(script=model.script))
        first, second = (Replica(folder / name, config(url, fake)) for name in "ab")
        for one in (first, second):
            stack.push_async_callback(one.end)
        await asyncio.gather(first.start(), second.start())
        session = await stack.enter_async_context(aiohttp.ClientSession())
        store = RedisStore(url, Retention(), deadline_s=5.0)
        stack.push_async_callback(store.aclose)
        a, b = Client(first.url, session), Client(second.url, session)
        yield Pair(first, second, a, b, fake, model, store)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_pair(tmp_path_factory: pytest.TempPathFactory, redis_server: Server) -> AsyncIterator[Pair]:
    async with replicas(tmp_path_factory.mktemp("pair"), redis_server) as here:
        yield here


@pytest.fixture
def pair(module_pair: Pair) -> Pair:
    module_pair.speak()
    return module_pair


# -- reading and continuing elsewhere


async def test_what_one_begins_another_shows(pair: Pair) -> None:
    made = await pair.a.post("/v1/responses", pair.asks("Polled."))
    assert made["status"] in ("queued", "in_progress")
    assert (made["background"], made["output"]) == (True, [])
    kept = await pair.b.over(made["id"])
    assert kept["status"] == "completed"
    assert kept["output"][-1]["content"][0]["text"] == pair.model.text
    assert await pair.a.get(f"/v1/responses/{made['id']}") == kept


async def test_a_stream_goes_on_elsewhere_behind_any_event(pair: Pair) -> None:
    told = await pair.a.listens(Told(), "/v1/responses", pair.asks("Resumed.", stream=True))
    assert told.done
    folded = fold(told.events)
    assert folded.response == await pair.b.get(f"/v1/responses/{told.id}")
    path = f"/v1/responses/{told.id}?stream=true"
    assert (await pair.b.listens(Told(), path)).raw == told.raw
    for number in range(len(told.raw)):
        rest = await pair.b.listens(Told(), f"{path}&starting_after={number}")
        assert rest.raw == told.raw[number + 1 :]


async def test_a_stream_that_breaks_goes_on_elsewhere_while_it_is_made(pair: Pair) -> None:
    pair.speak(delay_s=0.03)
    told = await pair.a.listens(Told(), "/v1/responses", pair.asks("Broken off.", stream=True), until=9)
    number = 9
    while not told.done:
        number += 4
        await (pair.b, pair.a)[number % 8 == 1].resumes(told, told.id, until=number)
    fold(told.events)
    assert len(prompts_about(pair.fake, "Broken off.")) == 1


async def test_a_chain_goes_on_elsewhere(pair: Pair) -> None:
    first = await pair.a.post("/v1/responses", pair.asks("Link one."))
    await pair.b.over(first["id"])
    second = await pair.b.post("/v1/responses", pair.asks("Link two.", previous_response_id=first["id"]))
    await pair.a.over(second["id"])
    [before, after] = prompts_about(pair.fake, "Link one.")
    final = ENCODING.decode(pair.model.answer).partition("<|start|>")[2].replace("<|return|>", "<|end|>")
    said = f"{ENCODING.decode(before)[: -len('<|start|>assistant')]}<|start|>{final}"
    assert ENCODING.decode(after) == f"{said}<|start|>user<|message|>Link two.<|end|><|start|>assistant"


@pytest.mark.slow
async def test_a_conversation_has_one_response_at_a_time(pair: Pair) -> None:
    pair.speak(delay_s=0.03)
    talk = (await pair.a.post("/v1/conversations"))["id"]
    first = await pair.a.post("/v1/responses", pair.asks("Mine.", conversation=talk))
    status, answer = await pair.b.asks("POST", "/v1/responses", pair.asks("Me too.", conversation=talk))
    assert (status, answer["error"]["code"]) == (409, "state_conflict")
    await pair.b.over(first["id"])
    second = await pair.b.post("/v1/responses", pair.asks("Now me.", conversation=talk))
    await pair.a.over(second["id"])
    items = (await pair.a.get(f"/v1/conversations/{talk}/items?order=asc"))["data"]
    assert [item["type"] for item in items] == ["message", "reasoning", "message"] * 2


async def test_a_log_is_read_in_either_dialect_whichever_it_was_asked_in(pair: Pair) -> None:
    told = await pair.a.listens(Told(), "/open-responses/v1/responses", pair.asks("Said.", stream=True))
    assert "response.reasoning.delta" in {event["type"] for event in told.events}
    again = await pair.b.listens(Told(), f"/open-responses/v1/responses/{told.id}?stream=true")
    assert again.raw == told.raw
    other = await pair.b.listens(Told(), f"/v1/responses/{told.id}?stream=true")
    assert "response.reasoning_text.delta" in {event["type"] for event in other.events}
    fold(other.events)


# -- calling off and deleting


@pytest.mark.parametrize("silent", [False, True], ids=["speaking", "silent"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
async def test_calling_off_frees_the_backend(pair: Pair, elsewhere: bool, silent: bool) -> None:
    pair.speak(delay_s=0.05, words=200, waits=silent)
    question = f"Stop it, {elsewhere} {silent}."
    made = await pair.a.post("/v1/responses", pair.asks(question))
    await pair.at_work(question)
    await asyncio.sleep(0.3)
    begun = asyncio.get_running_loop().time()
    off = await (pair.b if elsewhere else pair.a).post(f"/v1/responses/{made['id']}/cancel")
    assert off["status"] == "cancelled"
    assert asyncio.get_running_loop().time() - begun < SOON_S
    assert await pair.left(question) - begun < (SOON_S if elsewhere else QUICKLY_S)
    told = await pair.a.resumes(Told(), made["id"])
    assert fold(told.events).response == off
    assert await pair.b.get(f"/v1/responses/{made['id']}") == off
    assert await pair.a.post(f"/v1/responses/{made['id']}/cancel") == off


async def test_a_conversation_is_free_after_a_response_in_it_was_called_off_elsewhere(pair: Pair) -> None:
    pair.speak(delay_s=0.05, words=200)
    talk = (await pair.a.post("/v1/conversations"))["id"]
    made = await pair.a.post("/v1/responses", pair.asks("Off with it.", conversation=talk))
    await pair.at_work("Off with it.")
    assert (await pair.b.post(f"/v1/responses/{made['id']}/cancel"))["status"] == "cancelled"
    pair.speak()
    answer = await pair.a.post("/v1/responses", {"model": "gpt-oss", "input": "On.", "conversation": talk})
    assert answer["status"] == "completed"
    items = (await pair.b.get(f"/v1/conversations/{talk}/items?order=asc"))["data"]
    assert [item["type"] for item in items] == ["message", "reasoning", "message"]


async def test_two_that_call_off_at_once_both_see_it_off(pair: Pair) -> None:
    pair.speak(delay_s=0.05, words=200)
    made = await pair.a.post("/v1/responses", pair.asks("Both stop."))
    path = f"/v1/responses/{made['id']}/cancel"
    answers = await asyncio.gather(*(one.post(path) for one in (pair.a, pair.b, pair.b, pair.a)))
    assert [answer["status"] for answer in answers] == ["cancelled"] * 4
    assert all(answer == answers[0] for answer in answers)


async def test_calling_off_at_the_end_is_one_or_the_other(pair: Pair) -> None:
    for pause_s in (0.05, 0.15, 0.18, 0.2, 0.22, 0.25):
        pair.speak(words=10, delay_s=0.01)
        made = await pair.a.post("/v1/responses", pair.asks(f"Nearly {pause_s}."))
        await asyncio.sleep(pause_s)
        off = await pair.b.post(f"/v1/responses/{made['id']}/cancel")
        assert off["status"] in ("cancelled", "completed")
        told = await pair.a.resumes(Told(), made["id"])
        assert fold(told.events).response == off


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
async def test_deleting_frees_the_backend_and_the_conversation(pair: Pair, elsewhere: bool) -> None:
    pair.speak(waits=True)
    question = f"Forget it, {elsewhere}."
    talk = (await pair.a.post("/v1/conversations"))["id"]
    told = Told()
    body = pair.asks(question, stream=True, conversation=talk)
    listening = asyncio.create_task(pair.a.listens(told, "/v1/responses", body))
    await pair.at_work(question)
    while not told.events:
        await asyncio.sleep(0.005)
    begun = asyncio.get_running_loop().time()
    one = pair.b if elsewhere else pair.a
    status, answer = await one.asks("DELETE", f"/v1/responses/{told.id}")
    assert (status, answer["deleted"]) == (200, True)
    assert await pair.left(question) - begun < (SOON_S if elsewhere else QUICKLY_S)
    async with asyncio.timeout(5):
        await listening
    assert "error" in told.events[-1]
    assert not told.done
    pair.speak()
    async with asyncio.timeout(QUICKLY_S + 1):
        while True:
            body = {"model": "gpt-oss", "input": "Next.", "conversation": talk}
            status, answer = await one.asks("POST", "/v1/responses", body)
            if status == 200:
                break
            assert status == 409
            await asyncio.sleep(0.05)
    items = (await pair.b.get(f"/v1/conversations/{talk}/items?order=asc"))["data"]
    assert [item["type"] for item in items] == ["message", "reasoning", "message"]


# -- owners that go away and come back


async def test_a_process_that_is_told_to_end_leaves_its_response_to_another(
    tmp_path: Path, redis_server: Server
) -> None:
    async with replicas(tmp_path, redis_server) as pair:
        pair.speak(delay_s=0.03, words=40)
        made = await pair.a.post("/v1/responses", pair.asks("Carry on."))
        await pair.at_work("Carry on.")
        await asyncio.sleep(0.5)
        begun = asyncio.get_running_loop().time()
        pair.first.signal(signal.SIGTERM)
        await pair.at_work("Carry on.", 2)
        took = asyncio.get_running_loop().time() - begun
        assert took < SOON_S
        assert await pair.first.ended() == 0
        kept = await pair.b.over(made["id"])
        assert kept["status"] == "completed"
        told = await pair.b.resumes(Told(), made["id"])
        assert fold(told.events).response == kept
        first, second = prompts_about(pair.fake, "Carry on.")
        # What was said until the end was logged by the one that left.
        assert second[: len(first)] == first
        assert len(second) > len(first) + 8
        assert "Traceback" not in pair.first.log + pair.second.log


@pytest.mark.slow
async def test_a_process_that_slept_through_its_lease_writes_nothing_more(tmp_path: Path, redis_server: Server) -> None:
    async with replicas(tmp_path, redis_server) as pair:
        pair.speak(delay_s=0.04, words=40)
        made = await pair.a.post("/v1/responses", pair.asks("Sleep now."))
        await pair.at_work("Sleep now.")
        await asyncio.sleep(0.5)
        pair.first.signal(signal.SIGSTOP)
        await pair.at_work("Sleep now.", 2)
        await asyncio.sleep(0.2)
        before = await pair.store.events(LOCAL_TENANT, made["id"], 0)
        assert before is not None
        assert not before.ended
        woken = asyncio.get_running_loop().time()
        pair.first.signal(signal.SIGCONT)
        assert await pair.fake.gone(0) - woken < SOON_S
        kept = await pair.b.over(made["id"])
        assert kept["status"] == "completed"
        assert kept["output"][-1]["content"][0]["text"] == pair.model.text
        told = await pair.a.resumes(Told(), made["id"])
        assert fold(told.events).response == kept
        assert len(prompts_about(pair.fake, "Sleep now.")) == 2
        await asyncio.sleep(LEASE_S)
        assert (await pair.b.resumes(Told(), made["id"])).raw == told.raw
