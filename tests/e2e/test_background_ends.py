"""Abnormal ends of background responses: the final state agrees with the reported events."""

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
from unisono.api.responses.background import takeover

QUESTION = "How does it end?"
BODY: Json = {"model": "gpt-oss", "input": QUESTION, "background": True}
LEASE_S = 0.4


@dataclass
class Place:
    """A store and a model for consecutive gateways."""

    folder: Path
    fake: FakeVllm
    model: Model
    # URL of a Redis store instead of the file.
    redis: str = ""
    lease_s: float = LEASE_S

    @asynccontextmanager
    async def gateway(self, name: str = "gpt-oss") -> AsyncIterator[Client]:
        url = self.redis or f"sqlite:///{str(self.file).removeprefix('/')}"
        store = {"url": url, "lease_s": self.lease_s}
        config = config_of(f"vllm@{self.fake.url}", name=name, store=store, unisono={"current_date": "2026-11-20"})
        async with gateway(config) as running, aiohttp.ClientSession() as session:
            yield Client(running.url, session)

    @property
    def file(self) -> Path:
        return self.folder / "state.db"

    def change(self, statement: str, *values: object) -> int:
        """Change the stored state directly, in a way that no gateway does."""
        db = sqlite3.connect(self.file, timeout=5)
        try:
            with db:
                return db.execute(statement, values).rowcount
        finally:
            db.close()

    async def prompted(self, count: int = 1) -> None:
        async with asyncio.timeout(10):
            while len(prompts_about(self.fake, QUESTION)) < count:
                await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def store_numbers() -> Iterator[int]:
    """Numbers of unused Redis databases."""
    return itertools.count()


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    model = Model(delay_s=0.02)
    async with FakeVllm(script=model.script) as fake:
        yield Place(tmp_path, fake, model)


async def ended(client: Client, response_id: str) -> Json:
    """Wait for the end of a response and check its events against it."""
    response = await client.over(response_id)
    received = await client.resumes(Told(), response_id)
    assert received.done
    folded = fold(received.events)
    assert folded.response == response
    if response["status"] == "failed":
        assert folded.error is not None
        assert folded.error["message"] == response["error"]["message"]
    return response


@pytest.mark.parametrize("until", [None, 6, 25], ids=["no output", "reasoning", "text"])
async def test_response_fails_if_its_model_is_missing_for_too_long_after_a_restart(
    place: Place, until: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "MAX_LEFT_S", LEASE_S)
    place.model.waits = until is None
    async with place.gateway() as client:
        received = Told()
        await client.listens(received, "/v1/responses", {**BODY, "stream": True}, until=2 if until is None else until)
        await place.prompted()
    async with place.gateway(name="another-gpt-oss") as client:
        response = await ended(client, received.id)
        assert response["status"] == "failed"
        assert response["error"]["code"] == "server_error"
        assert "The model `gpt-oss` does not exist here" in response["error"]["message"]
        assert bool(response["output"]) == (until is not None)
        assert (await client.resumes(Told(), received.id)).raw[: len(received.raw)] == received.raw


async def test_a_gateway_without_the_model_leaves_the_response_to_a_gateway_that_has_it(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    left = "response left to other processes"
    async with place.gateway() as client:
        received = Told()
        await client.listens(received, "/v1/responses", {**BODY, "stream": True}, until=25)
    async with place.gateway(name="another-gpt-oss") as client:
        # The limit of takeovers after crashes does not apply to these attempts.
        with caplog.at_level("DEBUG", "unisono.responses"):
            async with asyncio.timeout(20):
                while len([each for each in caplog.records if each.message == left]) <= takeover.MAX_TAKEOVERS:
                    await asyncio.sleep(0.05)
        assert (await client.get(f"/v1/responses/{received.id}"))["status"] == "in_progress"
    assert [each.levelname for each in caplog.records if each.message == left][:2] == ["WARNING", "DEBUG"]
    async with place.gateway() as client:
        response = await ended(client, received.id)
        assert response["status"] == "completed"
        assert response["output"][-1]["content"][0]["text"] == place.model.text


@pytest.mark.parametrize("until", [2, 25], ids=["no output", "text"])
async def test_a_gateway_without_the_model_can_cancel_the_response(place: Place, until: int) -> None:
    place.model.waits = until == 2
    async with place.gateway() as client:
        received = Told()
        await client.listens(received, "/v1/responses", {**BODY, "stream": True}, until=until)
    async with place.gateway(name="another-gpt-oss") as client:
        cancelled = await client.post(f"/v1/responses/{received.id}/cancel")
        assert (cancelled["status"], cancelled["error"]) == ("cancelled", None)
        assert await ended(client, received.id) == cancelled
        assert bool(cancelled["output"]) == (until != 2)


def crash_background_tasks() -> None:
    """Cancel background tasks as in a crash: nothing is released, no notification is sent."""
    for task in asyncio.all_tasks():
        if task.get_name().startswith("background response"):
            task.cancel()


@pytest.mark.slow
async def test_response_is_abandoned_after_repeated_owner_crashes(place: Place) -> None:
    place.model.waits = True
    async with place.gateway() as client:
        created = await client.post("/v1/responses", BODY)
        await place.prompted()
    # A graceful handover neither increments nor resets the crash count.
    async with place.gateway() as client:
        for owner in range(2, 6):
            await place.prompted(owner)
            crash_background_tasks()
        response = await ended(client, created["id"])
        assert response["status"] == "failed"
        assert "every process that generated it crashed" in response["error"]["message"]
        assert len(prompts_about(place.fake, QUESTION)) == 5


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("redis", marks=pytest.mark.slow)])
async def test_graceful_handovers_do_not_count_as_crashes(
    place: Place, kind: str, request: pytest.FixtureRequest, store_numbers: Iterator[int]
) -> None:
    if kind == "redis":
        server: Server = request.getfixturevalue("redis_server")
        place.redis = f"redis://127.0.0.1:{server.port}/{next(store_numbers)}"
    place.model.waits = True
    async with place.gateway() as client:
        created = await client.post("/v1/responses", BODY)
        await place.prompted()
    for owner in range(2, 6):
        async with place.gateway():
            await place.prompted(owner)
    place.model.waits = False
    async with place.gateway() as client:
        response = await ended(client, created["id"])
        assert response["status"] == "completed"
        assert response["output"][-1]["content"][0]["text"] == place.model.text


@pytest.mark.slow
async def test_response_completes_despite_crashes_if_every_owner_makes_progress(place: Place) -> None:
    place.model.delay_s = 0.05
    async with place.gateway() as client:
        created = await client.post("/v1/responses", BODY)
        for owner in range(1, 7):
            await place.prompted(owner)
            await asyncio.sleep(0.4)
            crash_background_tasks()
        place.model.delay_s = 0.0
        response = await ended(client, created["id"])
        assert response["status"] == "completed"
        assert response["output"][-1]["content"][0]["text"] == place.model.text
        lengths = [len(prompt) for prompt in prompts_about(place.fake, QUESTION)]
        assert lengths == sorted(lengths)
        assert len(set(lengths)) > 3


async def test_response_fails_after_a_takeover_if_its_conversation_changed(place: Place) -> None:
    async with place.gateway() as client:
        conversation = (await client.post("/v1/conversations"))["id"]
        created = await client.post("/v1/responses", {**BODY, "conversation": conversation})
        await place.prompted()
    added = {"items": [{"type": "message", "role": "user", "content": "Meanwhile."}]}
    place.change("DELETE FROM runs")
    place.change("UPDATE leases SET until = 0")
    async with place.gateway() as client:
        await client.post(f"/v1/conversations/{conversation}/items", added)
        place.change("INSERT INTO runs VALUES ('local', ?, 0)", created["id"])
        response = await ended(client, created["id"])
        assert response["status"] == "failed"
        assert "conversation changed" in response["error"]["message"]
        items = (await client.get(f"/v1/conversations/{conversation}/items"))["data"]
        assert [item["content"][0]["text"] for item in items] == ["Meanwhile."]


async def test_a_conversation_stays_locked_until_its_interrupted_response_continues(place: Place) -> None:
    place.lease_s = 10.0
    async with place.gateway() as client:
        conversation = (await client.post("/v1/conversations"))["id"]
        created = await client.post("/v1/responses", {**BODY, "conversation": conversation})
        await place.prompted()
    place.change("DELETE FROM runs")
    added = {"items": [{"type": "message", "role": "user", "content": "Meanwhile."}]}
    async with place.gateway() as client:
        for path, body in (
            ("/v1/responses", {**BODY, "conversation": conversation}),
            ("/v1/responses", {"model": "gpt-oss", "input": "Meanwhile.", "conversation": conversation}),
            (f"/v1/conversations/{conversation}/items", added),
        ):
            status, answer = await client.asks("POST", path, body)
            assert (status, answer["error"]["code"]) == (409, "state_conflict")
        place.change("INSERT INTO runs VALUES ('local', ?, 0)", created["id"])
        response = await ended(client, created["id"])
        assert response["status"] == "completed"
        assert (await client.asks("POST", f"/v1/conversations/{conversation}/items", added))[0] == 200


async def test_cancelling_an_interrupted_response_spares_the_next_one_of_its_conversation(place: Place) -> None:
    async with place.gateway() as client:
        conversation = (await client.post("/v1/conversations"))["id"]
        created = await client.post("/v1/responses", {**BODY, "conversation": conversation})
        await place.prompted()
    # No gateway continued the response in time.
    place.change("DELETE FROM runs")
    place.change("UPDATE leases SET until = 0")
    place.model.delay_s = 0.05
    async with place.gateway() as client:
        body = {"model": "gpt-oss", "input": QUESTION, "conversation": conversation}
        following = asyncio.create_task(client.asks("POST", "/v1/responses", body))
        await place.prompted(2)
        status, answer = await client.asks("POST", f"/v1/responses/{created['id']}/cancel", {})
        assert (status, answer["error"]["code"]) == (409, "state_conflict")
        assert "another response" in answer["error"]["message"]
        status, answer = await following
        assert (status, answer["status"]) == (200, "completed")


@pytest.mark.parametrize("statement", ["UPDATE conversations SET revision = revision + 1", "DELETE FROM conversations"])
async def test_response_fails_if_its_conversation_changed_meanwhile(place: Place, statement: str) -> None:
    async with place.gateway() as client:
        conversation = (await client.post("/v1/conversations"))["id"]
        created = await client.post("/v1/responses", {**BODY, "conversation": conversation})
        await place.prompted()
        assert place.change(statement) == 1
        response = await ended(client, created["id"])
        assert response["status"] == "failed"
        assert "conversation changed" in response["error"]["message"]
        # The answer was generated and is not lost.
        assert response["output"][-1]["content"][0]["text"] == place.model.text
        assert len(prompts_about(place.fake, QUESTION)) == 1


async def test_an_answer_is_stored_although_its_input_fills_the_size_limit(place: Place) -> None:
    """Items that the model does not see fill the size limit of a response almost completely."""
    place.model = Model(words=400, per_chunk=50)
    place.fake.script = place.model.script
    invisible = [{"type": "web_search_call", "id": f"ws_{n}", "status": "completed", "query": ""} for n in range(9)]
    message = {"type": "message", "role": "user", "content": QUESTION}
    left = (8 << 20) - 8_000
    for item in invisible:
        item["query"] = ("quite " * 200_000)[: min(1_000_000, left)]
        left -= len(item["query"])
    async with place.gateway() as client:
        created = await client.post("/v1/responses", {**BODY, "input": [*invisible, message]})
        response = await ended(client, created["id"])
        assert response["status"] == "completed"
        assert response["output"][-1]["content"][0]["text"] == place.model.text


async def test_unreadable_responses_do_not_block_the_takeover_of_others(place: Place) -> None:
    place.model.waits = True
    async with place.gateway() as client:
        created = [await client.post("/v1/responses", BODY) for _ in range(21)]
        await place.prompted(21)
    broken = [response["id"] for response in created[:20]]
    for response_id in broken:
        place.change("UPDATE responses SET head = ? WHERE id = ?", b'{"v":99}', response_id)
        place.change("UPDATE runs SET until = 0 WHERE response = ?", response_id)
    for number in range(20):
        place.change("INSERT INTO runs VALUES ('local', ?, 0)", f"resp_{number:032x}")
    place.model.waits = False
    async with place.gateway() as client:
        ended_response = await ended(client, created[20]["id"])
        assert ended_response["status"] == "completed"
        status, answer = await client.asks("GET", f"/v1/responses/{broken[0]}")
        assert (status, answer["error"]["code"]) == (500, "state_unreadable")


# -- cancellation through another process


async def left_answers(client: Client) -> float:
    """Return the number of cancelled answers in the metrics of one gateway."""
    async with client.session.get(f"{client.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    cancelled = (line for line in lines if line.startswith("unisono_requests_total{") and 'outcome="left"' in line)
    return sum(float(line.rpartition(" ")[2]) for line in cancelled)


async def background_records(client: Client) -> list[Json]:
    return [record for record in (await client.get("/v1/requests"))["data"] if record["route"] == "background"]


@pytest.mark.parametrize("model", ["gpt-oss", "another-gpt-oss"])
async def test_answer_cancelled_through_another_gateway_is_reported_once_by_its_generator(
    place: Place, model: str
) -> None:
    place.fake.script = Model(delay_s=0.1, words=400).script
    place.lease_s = 10.0
    async with place.gateway() as generating, place.gateway(model) as other:
        created = await generating.post("/v1/responses", BODY)
        await place.prompted()
        await asyncio.sleep(0.5)
        assert (await other.post(f"/v1/responses/{created['id']}/cancel"))["status"] == "cancelled"
        async with asyncio.timeout(20):
            while not (records := await background_records(other)):
                await asyncio.sleep(0.1)
        [record] = records
        assert record["finish"] == "left"
        assert record["deployment"]
        assert record["input_tokens"] > 0
        assert record["output_tokens"] > 0
        assert [await left_answers(client) for client in (generating, other)] == [1, 0]
