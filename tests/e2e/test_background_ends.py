"""Whatever becomes of a background response, it comes to an end that fits what was told of it: here the ends that
nobody wished for."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests.api.responses.folding import fold
from tests.contract.servers import Server
from tests.e2e.continuing import Model, prompts_about
from tests.e2e.gateway import config_of, gateway
from tests.e2e.replicas import Client, Json, Told
from tests.fakes import FakeVllm

QUESTION = "How does it end?"
BODY: Json = {"model": "gpt-oss", "input": QUESTION, "background": True}
LEASE_S = 0.4


@dataclass
class Place:
    """One file of state, and one model, for gateways that come and go."""

    folder: Path
    fake: FakeVllm
    model: Model
    redis: str = ""
    """The URL of a store in place of the file."""

    @asynccontextmanager
    async def gateway(self, name: str = "gpt-oss") -> AsyncIterator[Client]:
        url = self.redis or f"sqlite:///{str(self.file).removeprefix('/')}"
        store = {"url": url, "lease_s": LEASE_S}
        config = config_of(f"vllm@{self.fake.url}", name=name, store=store, unisono={"current_date": "2026-11-20"})
        async with gateway(config) as here, aiohttp.ClientSession() as session:
            yield Client(here.url, session)

    @property
    def file(self) -> Path:
        return self.folder / "state.db"

    def change(self, statement: str, *values: object) -> int:
        """Do to the state what no gateway would."""
        db = sqlite3.connect(self.file, timeout=5)
        try:
            with db:
                return db.execute(statement, values).rowcount
        finally:
            db.close()

    async def said(self, count: int = 1) -> None:
        async with asyncio.timeout(10):
            while len(prompts_about(self.fake, QUESTION)) < count:
                await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def store_numbers() -> Iterator[int]:
    """Numbers of Redis databases that no test has used."""
    return itertools.count()


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    model = Model(delay_s=0.02)
    async with FakeVllm(script=model.script) as fake:
        yield Place(tmp_path, fake, model)


async def ended(client: Client, response_id: str) -> Json:
    """The response once it is over, after its events were seen to fit it."""
    kept = await client.over(response_id)
    told = await client.resumes(Told(), response_id)
    assert told.done
    folded = fold(told.events)
    assert folded.response == kept
    if kept["status"] == "failed":
        assert folded.error is not None
        assert folded.error["message"] == kept["error"]["message"]
    return kept


@pytest.mark.parametrize("until", [None, 6, 25], ids=["nothing said", "thinking", "speaking"])
async def test_a_model_that_is_gone_after_a_restart_fails_what_it_began(place: Place, until: int | None) -> None:
    place.model.waits = until is None
    async with place.gateway() as client:
        told = Told()
        await client.listens(told, "/v1/responses", {**BODY, "stream": True}, until=2 if until is None else until)
        await place.said()
    async with place.gateway(name="another-gpt-oss") as client:
        kept = await ended(client, told.id)
        assert kept["status"] == "failed"
        assert "gpt-oss" in kept["error"]["message"]
        assert bool(kept["output"]) == (until is not None)
        assert (await client.resumes(Told(), told.id)).raw[: len(told.raw)] == told.raw


def deaths() -> None:
    """End what is made as a crash would: nothing is given back, nobody is told."""
    for task in asyncio.all_tasks():
        if task.get_name().startswith("background response"):
            task.cancel()


@pytest.mark.slow
async def test_what_kills_every_owner_is_given_up(place: Place) -> None:
    place.model.waits = True
    async with place.gateway() as client:
        made = await client.post("/v1/responses", BODY)
        await place.said()
    # A graceful handover neither counts nor clears the count.
    async with place.gateway() as client:
        for owner in range(2, 6):
            await place.said(owner)
            deaths()
        kept = await ended(client, made["id"])
        assert kept["status"] == "failed"
        assert "was abandoned" in kept["error"]["message"]
        assert len(prompts_about(place.fake, QUESTION)) == 5


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("redis", marks=pytest.mark.slow)])
async def test_graceful_handovers_are_no_crashes(
    place: Place, kind: str, request: pytest.FixtureRequest, store_numbers: Iterator[int]
) -> None:
    if kind == "redis":
        server: Server = request.getfixturevalue("redis_server")
        place.redis = f"redis://127.0.0.1:{server.port}/{next(store_numbers)}"
    place.model.waits = True
    async with place.gateway() as client:
        made = await client.post("/v1/responses", BODY)
        await place.said()
    for owner in range(2, 6):
        async with place.gateway():
            await place.said(owner)
    place.model.waits = False
    async with place.gateway() as client:
        kept = await ended(client, made["id"])
        assert kept["status"] == "completed"
        assert kept["output"][-1]["content"][0]["text"] == place.model.text


@pytest.mark.slow
async def test_owners_that_come_and_go_finish_what_they_get_on_with(place: Place) -> None:
    place.model.delay_s = 0.05
    async with place.gateway() as client:
        made = await client.post("/v1/responses", BODY)
        for owner in range(1, 7):
            await place.said(owner)
            await asyncio.sleep(0.4)
            deaths()
        place.model.delay_s = 0.0
        kept = await ended(client, made["id"])
        assert kept["status"] == "completed"
        assert kept["output"][-1]["content"][0]["text"] == place.model.text
        said = [len(prompt) for prompt in prompts_about(place.fake, QUESTION)]
        assert said == sorted(said)
        assert len(set(said)) > 3


async def test_a_conversation_that_went_on_without_it_fails_it(place: Place) -> None:
    async with place.gateway() as client:
        talk = (await client.post("/v1/conversations"))["id"]
        made = await client.post("/v1/responses", {**BODY, "conversation": talk})
        await place.said()
    added = {"items": [{"type": "message", "role": "user", "content": "Meanwhile."}]}
    place.change("DELETE FROM runs")
    async with place.gateway() as client:
        await client.post(f"/v1/conversations/{talk}/items", added)
        place.change("INSERT INTO runs VALUES ('local', ?, 0)", made["id"])
        kept = await ended(client, made["id"])
        assert kept["status"] == "failed"
        assert "conversation changed" in kept["error"]["message"]
        items = (await client.get(f"/v1/conversations/{talk}/items"))["data"]
        assert [item["content"][0]["text"] for item in items] == ["Meanwhile."]


@pytest.mark.parametrize("how", ["UPDATE conversations SET revision = revision + 1", "DELETE FROM conversations"])
async def test_an_answer_that_cannot_be_added_to_its_conversation_fails(place: Place, how: str) -> None:
    async with place.gateway() as client:
        talk = (await client.post("/v1/conversations"))["id"]
        made = await client.post("/v1/responses", {**BODY, "conversation": talk})
        await place.said()
        assert place.change(how) == 1
        kept = await ended(client, made["id"])
        assert kept["status"] == "failed"
        assert "conversation changed" in kept["error"]["message"]
        # It was said all the same, and is not lost.
        assert kept["output"][-1]["content"][0]["text"] == place.model.text
        assert len(prompts_about(place.fake, QUESTION)) == 1


async def test_an_answer_that_is_too_large_to_be_kept_fails(place: Place) -> None:
    """Items that say nothing to the model fill what a response may be, but for a little."""
    place.model = Model(words=400, per_chunk=50)
    place.fake.script = place.model.script
    silent = [{"type": "web_search_call", "id": f"ws_{n}", "status": "completed", "query": ""} for n in range(9)]
    said = {"type": "message", "role": "user", "content": QUESTION}
    left = (8 << 20) - 8_000
    for item in silent:
        item["query"] = ("quite " * 200_000)[: min(1_000_000, left)]
        left -= len(item["query"])
    async with place.gateway() as client:
        made = await client.post("/v1/responses", {**BODY, "input": [*silent, said]})
        kept = await client.over(made["id"])
        assert kept["status"] == "failed"
        assert kept["output"] == []
        assert "cannot be stored" in kept["error"]["message"]
        told = await client.resumes(Told(), made["id"])
        assert told.events[-1]["response"] == kept
        assert [event["sequence_number"] for event in told.events] == list(range(len(told.events)))


async def test_what_cannot_be_read_keeps_nobody_from_being_found(place: Place) -> None:
    place.model.waits = True
    async with place.gateway() as client:
        made = [await client.post("/v1/responses", BODY) for _ in range(21)]
        await place.said(21)
    broken = [response["id"] for response in made[:20]]
    for response_id in broken:
        place.change("UPDATE responses SET head = ? WHERE id = ?", b'{"v":99}', response_id)
        place.change("UPDATE runs SET until = 0 WHERE response = ?", response_id)
    for number in range(20):
        place.change("INSERT INTO runs VALUES ('local', ?, 0)", f"resp_{number:032x}")
    place.model.waits = False
    async with place.gateway() as client:
        kept = await ended(client, made[20]["id"])
        assert kept["status"] == "completed"
        status, answer = await client.asks("GET", f"/v1/responses/{broken[0]}")
        assert (status, answer["error"]["code"]) == (500, "state_unreadable")
