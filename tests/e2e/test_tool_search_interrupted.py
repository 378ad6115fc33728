"""Searches of the gateway that are interrupted: by a client that disconnects, or by the end of the gateway."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.api.responses.folding import fold
from tests.e2e.gateway import config_of, gateway
from tests.e2e.replicas import LEASE_S, Client, Told, replica
from tests.e2e.responses import ANSWER, Json, Line, kinds, line
from tests.e2e.test_responses_leaving import send_request
from tests.e2e.test_tool_search import ASKED, LOOKS, SEARCH, SEARCHES, STARS
from tests.e2e.wires import ENCODING, WIRES, Fake, asked
from tests.fakes import FakeVllm

WIRE = WIRES["vllm"]
LETTERS = random.Random(0)


def text(words: int) -> str:
    return " ".join("".join(LETTERS.choices("abcdefghij", k=5)) for _ in range(words))


# As much text as a request may declare, so that a search takes a while.
MANY: list[Json] = [
    {"type": "function", "name": f"tool{number}", "description": text(600), "defer_loading": True}
    for number in range(110)
]
SLOW_TOOLS = [SEARCH, STARS, *MANY]
SEARCH_S = 1.0


@pytest.fixture
async def harness() -> AsyncIterator[Line]:
    async with line(WIRE) as running:
        yield running


async def until_searching(fake: Fake) -> None:
    """Wait until the model has written the search."""
    async with asyncio.timeout(10):
        while not (requests := asked(fake)) or requests[0].done_at is None:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_disconnect_during_a_search_ends_the_answer(harness: Line, stream: bool) -> None:
    conversation = await harness.conversation()
    harness.say(SEARCHES, WIRE.script(ANSWER, delay_s=0.2))
    before = len(asyncio.all_tasks())
    client = await send_request(harness, input=[ASKED], tools=SLOW_TOOLS, stream=stream, conversation=conversation)
    await until_searching(harness.fake)
    client.transport.abort()
    await asyncio.sleep(SEARCH_S)
    # If the search was over already, the next generation is aborted.
    assert [request.done_at for request in asked(harness.fake)[1:]] in ([], [None])
    assert await harness.items(conversation) == []
    async with asyncio.timeout(5):
        while len(asyncio.all_tasks()) > before:
            await asyncio.sleep(0.02)
    harness.say(ANSWER)
    await harness.whole(input=[ASKED], conversation=conversation)
    assert len(await harness.items(conversation)) == 3


def script_of(searches: list[int]) -> Any:
    """Script: search, then call what was found; `searches` has a number for every prompt."""

    def script(body: Json) -> Any:
        searches.append(len(body["prompt"]))
        return WIRE.script(LOOKS if "Found: sky__look" in ENCODING.decode(body["prompt"]) else SEARCHES)

    return script


def check(ended: Json, received: Told, fake: FakeVllm) -> None:
    """Check a response that one gateway began and another one ended."""
    assert ended["status"] == "completed"
    shown = [kind for kind in kinds(ended["output"]) if kind != "reasoning"]
    assert shown == ["tool_search_call", "tool_search_output", "function_call"]
    assert fold(received.events).response == ended
    prompts = [request.json["prompt"] for request in asked(fake)]
    assert prompts[-1][: len(prompts[0])] == prompts[0]
    assert ENCODING.decode(prompts[-1]).count("type sky__look = (_: {") == 1


@pytest.mark.parametrize("grace_s", [5.0, 0.01], ids=["in time", "late"])
async def test_a_search_continues_after_a_handover(tmp_path: Path, grace_s: float) -> None:
    async with FakeVllm(tokens=[]) as fake, aiohttp.ClientSession() as session:
        prompts: list[int] = []
        fake.script = script_of(prompts)
        store = {"url": f"sqlite:///{tmp_path}/state.db", "deadline_s": 5, "lease_s": LEASE_S}
        config = config_of(f"vllm@{fake.url}", store=store)
        async with gateway(config) as first:
            assert first.app is not None
            body = {"model": "gpt-oss", "input": [ASKED], "tools": SLOW_TOOLS, "background": True}
            response = await Client(first.url, session).post("/v1/responses", body)
            await until_searching(fake)
            await first.app.state.gateway.hand_over(grace_s)
            assert len(prompts) == 1
        async with gateway(config) as second:
            client = Client(second.url, session)
            ended = await client.over(response["id"])
            check(ended, await client.resumes(Told(), response["id"]), fake)
            assert len(prompts) == 2


@pytest.mark.slow
async def test_a_search_is_repeated_after_a_crash(tmp_path: Path) -> None:
    async with FakeVllm(tokens=[]) as fake, aiohttp.ClientSession() as session:
        prompts: list[int] = []
        fake.script = script_of(prompts)
        store = {"url": f"sqlite:///{tmp_path}/state.db", "deadline_s": 5, "lease_s": LEASE_S}
        config = config_of(f"vllm@{fake.url}", store=store)
        async with replica(tmp_path / "a", config) as first:
            body = {"model": "gpt-oss", "input": [ASKED], "tools": SLOW_TOOLS, "background": True}
            response = await Client(first.url, session).post("/v1/responses", body)
            await until_searching(fake)
            await asyncio.sleep(0.05)
            first.kill()
            await first.ended()
        async with replica(tmp_path / "b", config) as second:
            client = Client(second.url, session)
            ended = await client.over(response["id"])
            check(ended, await client.resumes(Told(), response["id"]), fake)
