"""Background responses on two replicas: create on one; read, resume, cancel, delete on any."""

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

# Limit for effects in the process that generates a response.
QUICKLY_S = 0.5
# Limit for effects in another process, with a lease of one second.
SOON_S = 2.0


@dataclass
class Pair:
    """Two replicas with one Redis and one model."""

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
        """Wait until the model got `count` prompts with the question."""
        async with asyncio.timeout(10):
            while len(prompts_about(self.fake, question)) < count:
                await asyncio.sleep(0.005)

    async def left(self, question: str) -> float:
        """Return when the last prompting process closed its connection to the model."""
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
    # Each pair has its own database, because it would take over responses of other pairs.
    url = f"redis://127.0.0.1:{server.port}/{next(DATABASES)}"
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeVllm(script=model.script))
        first, second = (Replica(folder / name, config(url, fake)) for name in "ab")
        for process in (first, second):
            stack.push_async_callback(process.end)
        await asyncio.gather(first.start(), second.start())
        session = await stack.enter_async_context(aiohttp.ClientSession())
        store = RedisStore(url, Retention(), deadline_s=5.0)
        stack.push_async_callback(store.aclose)
        a, b = Client(first.url, session), Client(second.url, session)
        yield Pair(first, second, a, b, fake, model, store)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_pair(tmp_path_factory: pytest.TempPathFactory, redis_server: Server) -> AsyncIterator[Pair]:
    async with replicas(tmp_path_factory.mktemp("pair"), redis_server) as running:
        yield running


@pytest.fixture
def pair(module_pair: Pair) -> Pair:
    module_pair.speak()
    return module_pair


# -- reading and resuming on the other replica


async def test_response_of_one_replica_is_readable_on_the_other(pair: Pair) -> None:
    created = await pair.a.post("/v1/responses", pair.asks("Polled."))
    assert created["status"] in ("queued", "in_progress")
    assert (created["background"], created["output"]) == (True, [])
    stored = await pair.b.over(created["id"])
    assert stored["status"] == "completed"
    assert stored["output"][-1]["content"][0]["text"] == pair.model.text
    assert await pair.a.get(f"/v1/responses/{created['id']}") == stored


async def test_stream_resumes_on_the_other_replica_after_any_event(pair: Pair) -> None:
    received = await pair.a.listens(Told(), "/v1/responses", pair.asks("Resumed.", stream=True))
    assert received.done
    folded = fold(received.events)
    assert folded.response == await pair.b.get(f"/v1/responses/{received.id}")
    path = f"/v1/responses/{received.id}?stream=true"
    assert (await pair.b.listens(Told(), path)).raw == received.raw
    for number in range(len(received.raw)):
        rest = await pair.b.listens(Told(), f"{path}&starting_after={number}")
        assert rest.raw == received.raw[number + 1 :]
        assert rest.done
    assert (await pair.b.listens(Told(), f"{path}&starting_after={len(received.raw) + 7}")).done


async def test_running_stream_resumes_alternately_on_both_replicas(pair: Pair) -> None:
    pair.speak(delay_s=0.03)
    received = await pair.a.listens(Told(), "/v1/responses", pair.asks("Broken off.", stream=True), until=9)
    number = 9
    while not received.done:
        number += 4
        await (pair.b, pair.a)[number % 8 == 1].resumes(received, received.id, until=number)
    fold(received.events)
    assert len(prompts_about(pair.fake, "Broken off.")) == 1


async def test_previous_response_id_works_across_replicas(pair: Pair) -> None:
    first = await pair.a.post("/v1/responses", pair.asks("Link one."))
    await pair.b.over(first["id"])
    second = await pair.b.post("/v1/responses", pair.asks("Link two.", previous_response_id=first["id"]))
    await pair.a.over(second["id"])
    [before, after] = prompts_about(pair.fake, "Link one.")
    final = ENCODING.decode(pair.model.answer).partition("<|start|>")[2].replace("<|return|>", "<|end|>")
    previous = f"{ENCODING.decode(before)[: -len('<|start|>assistant')]}<|start|>{final}"
    assert ENCODING.decode(after) == f"{previous}<|start|>user<|message|>Link two.<|end|><|start|>assistant"


@pytest.mark.slow
async def test_conversation_runs_only_one_response_at_a_time(pair: Pair) -> None:
    pair.speak(delay_s=0.03)
    conversation = (await pair.a.post("/v1/conversations"))["id"]
    first = await pair.a.post("/v1/responses", pair.asks("Mine.", conversation=conversation))
    status, answer = await pair.b.asks("POST", "/v1/responses", pair.asks("Me too.", conversation=conversation))
    assert (status, answer["error"]["code"]) == (409, "state_conflict")
    await pair.b.over(first["id"])
    second = await pair.b.post("/v1/responses", pair.asks("Now me.", conversation=conversation))
    await pair.a.over(second["id"])
    items = (await pair.a.get(f"/v1/conversations/{conversation}/items?order=asc"))["data"]
    assert [item["type"] for item in items] == ["message", "reasoning", "message"] * 2


async def test_event_log_is_readable_in_both_dialects(pair: Pair) -> None:
    received = await pair.a.listens(Told(), "/open-responses/v1/responses", pair.asks("Said.", stream=True))
    assert "response.reasoning.delta" in {event["type"] for event in received.events}
    repeated = await pair.b.listens(Told(), f"/open-responses/v1/responses/{received.id}?stream=true")
    assert repeated.raw == received.raw
    converted = await pair.b.listens(Told(), f"/v1/responses/{received.id}?stream=true")
    assert "response.reasoning_text.delta" in {event["type"] for event in converted.events}
    fold(converted.events)


# -- cancelling and deleting


@pytest.mark.parametrize("silent", [False, True], ids=["streaming", "silent"])
@pytest.mark.parametrize("on_other", [False, True], ids=["same replica", "other replica"])
async def test_cancelling_frees_the_backend(pair: Pair, on_other: bool, silent: bool) -> None:
    pair.speak(delay_s=0.05, words=200, waits=silent)
    question = f"Stop it, {on_other} {silent}."
    created = await pair.a.post("/v1/responses", pair.asks(question))
    await pair.at_work(question)
    await asyncio.sleep(0.3)
    started = asyncio.get_running_loop().time()
    cancelled = await (pair.b if on_other else pair.a).post(f"/v1/responses/{created['id']}/cancel")
    assert cancelled["status"] == "cancelled"
    assert asyncio.get_running_loop().time() - started < SOON_S
    assert await pair.left(question) - started < (SOON_S if on_other else QUICKLY_S)
    received = await pair.a.resumes(Told(), created["id"])
    assert fold(received.events).response == cancelled
    assert await pair.b.get(f"/v1/responses/{created['id']}") == cancelled
    assert await pair.a.post(f"/v1/responses/{created['id']}/cancel") == cancelled


async def test_cancelling_on_the_other_replica_unlocks_the_conversation(pair: Pair) -> None:
    pair.speak(delay_s=0.05, words=200)
    conversation = (await pair.a.post("/v1/conversations"))["id"]
    created = await pair.a.post("/v1/responses", pair.asks("Off with it.", conversation=conversation))
    await pair.at_work("Off with it.")
    assert (await pair.b.post(f"/v1/responses/{created['id']}/cancel"))["status"] == "cancelled"
    pair.speak()
    answer = await pair.a.post("/v1/responses", {"model": "gpt-oss", "input": "On.", "conversation": conversation})
    assert answer["status"] == "completed"
    items = (await pair.b.get(f"/v1/conversations/{conversation}/items?order=asc"))["data"]
    assert [item["type"] for item in items] == ["message", "reasoning", "message"]


async def test_concurrent_cancellations_return_the_same_response(pair: Pair) -> None:
    pair.speak(delay_s=0.05, words=200)
    created = await pair.a.post("/v1/responses", pair.asks("Both stop."))
    path = f"/v1/responses/{created['id']}/cancel"
    answers = await asyncio.gather(*(client.post(path) for client in (pair.a, pair.b, pair.b, pair.a)))
    assert [answer["status"] for answer in answers] == ["cancelled"] * 4
    assert all(answer == answers[0] for answer in answers)


async def test_cancelling_near_the_end_leaves_a_consistent_response(pair: Pair) -> None:
    for pause_s in (0.05, 0.15, 0.18, 0.2, 0.22, 0.25):
        pair.speak(words=10, delay_s=0.01)
        created = await pair.a.post("/v1/responses", pair.asks(f"Nearly {pause_s}."))
        await asyncio.sleep(pause_s)
        cancelled = await pair.b.post(f"/v1/responses/{created['id']}/cancel")
        assert cancelled["status"] in ("cancelled", "completed")
        received = await pair.a.resumes(Told(), created["id"])
        assert fold(received.events).response == cancelled


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("on_other", [False, True], ids=["same replica", "other replica"])
async def test_deleting_frees_the_backend_and_the_conversation(pair: Pair, on_other: bool) -> None:
    pair.speak(waits=True)
    question = f"Forget it, {on_other}."
    conversation = (await pair.a.post("/v1/conversations"))["id"]
    received = Told()
    body = pair.asks(question, stream=True, conversation=conversation)
    listening = asyncio.create_task(pair.a.listens(received, "/v1/responses", body))
    await pair.at_work(question)
    while not received.events:
        await asyncio.sleep(0.005)
    started = asyncio.get_running_loop().time()
    client = pair.b if on_other else pair.a
    status, answer = await client.asks("DELETE", f"/v1/responses/{received.id}")
    assert (status, answer["deleted"]) == (200, True)
    assert await pair.left(question) - started < (SOON_S if on_other else QUICKLY_S)
    async with asyncio.timeout(5):
        await listening
    assert "error" in received.events[-1]
    assert not received.done
    pair.speak()
    async with asyncio.timeout(QUICKLY_S + 1):
        while True:
            body = {"model": "gpt-oss", "input": "Next.", "conversation": conversation}
            status, answer = await client.asks("POST", "/v1/responses", body)
            if status == 200:
                break
            assert status == 409
            await asyncio.sleep(0.05)
    items = (await pair.b.get(f"/v1/conversations/{conversation}/items?order=asc"))["data"]
    assert [item["type"] for item in items] == ["message", "reasoning", "message"]


# -- owners that stop or resume


@pytest.mark.slow
async def test_terminated_process_hands_its_response_to_the_other(tmp_path: Path, redis_server: Server) -> None:
    async with replicas(tmp_path, redis_server) as pair:
        pair.speak(delay_s=0.03, words=40)
        created = await pair.a.post("/v1/responses", pair.asks("Carry on."))
        await pair.at_work("Carry on.")
        await asyncio.sleep(0.5)
        started = asyncio.get_running_loop().time()
        pair.first.signal(signal.SIGTERM)
        await pair.at_work("Carry on.", 2)
        took = asyncio.get_running_loop().time() - started
        assert took < SOON_S
        assert await pair.first.ended() == 0
        response = await pair.b.over(created["id"])
        assert response["status"] == "completed"
        received = await pair.b.resumes(Told(), created["id"])
        assert fold(received.events).response == response
        first, second = prompts_about(pair.fake, "Carry on.")
        # The terminated process stored all tokens up to its end.
        assert second[: len(first)] == first
        assert len(second) > len(first) + 8
        assert "Traceback" not in pair.first.log + pair.second.log


@pytest.mark.slow
async def test_paused_process_writes_nothing_after_its_lease_expired(tmp_path: Path, redis_server: Server) -> None:
    async with replicas(tmp_path, redis_server) as pair:
        pair.speak(delay_s=0.04, words=40)
        created = await pair.a.post("/v1/responses", pair.asks("Sleep now."))
        await pair.at_work("Sleep now.")
        await asyncio.sleep(0.5)
        pair.first.signal(signal.SIGSTOP)
        await pair.at_work("Sleep now.", 2)
        await asyncio.sleep(0.2)
        before = await pair.store.events(LOCAL_TENANT, created["id"], 0)
        assert before is not None
        assert not before.ended
        woken = asyncio.get_running_loop().time()
        pair.first.signal(signal.SIGCONT)
        assert await pair.fake.gone(0) - woken < SOON_S
        response = await pair.b.over(created["id"])
        assert response["status"] == "completed"
        assert response["output"][-1]["content"][0]["text"] == pair.model.text
        received = await pair.a.resumes(Told(), created["id"])
        assert fold(received.events).response == response
        assert len(prompts_about(pair.fake, "Sleep now.")) == 2
        await asyncio.sleep(LEASE_S)
        assert (await pair.b.resumes(Told(), created["id"])).raw == received.raw
