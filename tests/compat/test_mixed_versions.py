"""An earlier and the current version as replicas on one Redis, as during a rolling upgrade."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.api.responses.folding import fold
from tests.compat.scenario import (
    FIRST_DAY,
    LONG,
    LOOK_UP,
    MASTER_KEY,
    SALT,
    SEALED,
    TOOL,
    UNFINISHED,
    Json,
    config,
    script,
    without_text,
)
from tests.contract.servers import Server
from tests.e2e.continuing import prompts_about
from tests.e2e.keyed import Ring, bearing
from tests.e2e.replicas import Client, Replica, Told
from tests.e2e.wires import ENCODING
from tests.fakes import FakeVllm
from unisono.access.keys import Mint
from unisono.core.quotas import KeyLimits
from unisono.store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

VERSIONS = ("earlier", "current")
# Each test runs in both directions: the first version begins, the second one continues.
BOTH_WAYS = pytest.mark.parametrize(("first", "second"), [VERSIONS, VERSIONS[::-1]], ids=["upgrade", "downgrade"])
DATABASES = itertools.count()


@dataclass
class Pair:
    """A replica of each version on one Redis, with one backend."""

    replicas: Mapping[str, Replica]
    session: aiohttp.ClientSession
    fake: FakeVllm
    ring: Ring

    def client(self, version: str) -> Client:
        return Client(self.replicas[version].url, self.session)

    async def respond(self, version: str, input: Any, **fields: Any) -> Json:
        answer: Json = await self.client(version).post("/v1/responses", {"model": "gpt-oss", "input": input, **fields})
        return answer

    async def status(self, version: str, key: str) -> tuple[int, str]:
        """Send a chat request with a key, and return the HTTP status and the code of the error."""
        body = {"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
        status, answer = await self.client(version).asks("POST", "/v1/chat/completions", body, **bearing(key))
        return status, answer.get("error", {}).get("code", "")

    async def generating(self, question: str, tokens: int = 20) -> None:
        """Wait until the backend has sent about this many tokens of the long answer."""
        async with asyncio.timeout(20):
            while not prompts_about(self.fake, question):
                await asyncio.sleep(0.01)
        await asyncio.sleep(LONG.delay_s * tokens / LONG.per_chunk)


@asynccontextmanager
async def started(folder: Path, server: Server, environment: Mapping[str, str]) -> AsyncIterator[Pair]:
    url = f"redis://127.0.0.1:{server.port}/{next(DATABASES)}"
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeVllm(script=script))
        settings = config(url, fake.url, FIRST_DAY)
        replicas = {
            "earlier": Replica(folder / "earlier", settings, environment=environment),
            "current": Replica(folder / "current", settings),
        }
        for replica in replicas.values():
            stack.push_async_callback(replica.end)
        await asyncio.gather(*(replica.start() for replica in replicas.values()))
        session = await stack.enter_async_context(aiohttp.ClientSession(headers=bearing(MASTER_KEY)))
        store = open_store(url, deadline_s=5.0)
        stack.push_async_callback(store.aclose)
        await store.start()
        yield Pair(replicas, session, fake, Ring(store, Mint(SALT.encode())))
        for replica in replicas.values():
            assert "Traceback" not in replica.log


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    tmp_path_factory: pytest.TempPathFactory, redis_server: Server, earlier_environment: dict[str, str]
) -> AsyncIterator[Pair]:
    async with started(tmp_path_factory.mktemp("pair"), redis_server, earlier_environment) as started_pair:
        yield started_pair


# -- stored objects


async def test_a_chain_of_responses_alternates_between_versions(pair: Pair) -> None:
    links = [await pair.respond("earlier", "Link 0.")]
    for number in range(1, 6):
        version = VERSIONS[number % 2]
        links.append(await pair.respond(version, f"Link {number}.", previous_response_id=links[-1]["id"]))
    for link in links:
        path = f"/v1/responses/{link['id']}"
        assert await pair.client("earlier").get(path) == await pair.client("current").get(path) == link
    # Every prompt begins with the previous one up to its final answer, with equal tokens.
    prompts = prompts_about(pair.fake, "Link 0.")
    assert len(prompts) == 6
    for before, after in itertools.pairwise(prompts):
        assert after[: len(before) - 2] == before[:-2]


async def test_a_conversation_alternates_between_versions(pair: Pair) -> None:
    talk = (await pair.client("earlier").post("/v1/conversations", {"metadata": {"a": "b"}}))["id"]
    for number in range(4):
        await pair.respond(VERSIONS[number % 2], f"Turn {number}.", conversation=talk)
    path = f"/v1/conversations/{talk}/items?order=asc"
    pages = [await pair.client(version).get(path) for version in VERSIONS]
    assert pages[0] == pages[1]
    assert [item["type"] for item in pages[0]["data"]] == ["message", "reasoning", "message"] * 4
    assert await pair.client("current").get(f"/v1/conversations/{talk}") == await pair.client("earlier").get(
        f"/v1/conversations/{talk}"
    )


@BOTH_WAYS
async def test_a_seal_of_one_version_opens_in_the_other(pair: Pair, first: str, second: str) -> None:
    question = f"{first}: {LOOK_UP}"
    made = await pair.respond(first, question, tools=[TOOL], **SEALED)
    [call] = [item for item in made["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "blue"}
    items = [{"role": "user", "content": question}, *without_text(made["output"]), result]
    for version in (first, second):
        await pair.respond(version, items, tools=[TOOL], **SEALED)
    _, *prompts = prompts_about(pair.fake, question)
    thought = "<|start|>assistant<|channel|>analysis<|message|>The tool knows it.<|end|>"
    assert [thought in ENCODING.decode(prompt) for prompt in prompts] == [True, True]


@BOTH_WAYS
async def test_a_compaction_of_one_version_opens_in_the_other(pair: Pair, first: str, second: str) -> None:
    made = await pair.client(first).post("/v1/responses/compact", {"model": "gpt-oss", "input": f"By {first}."})
    question = f"After {first}."
    for version in (first, second):
        await pair.respond(version, [*made["output"], {"role": "user", "content": question}], store=False)
    prompts = prompts_about(pair.fake, question)
    assert prompts[0] == prompts[1]


# -- background responses


@BOTH_WAYS
async def test_a_background_response_of_one_version_is_followed_in_the_other(
    pair: Pair, first: str, second: str
) -> None:
    question = f"Followed, {first}. {UNFINISHED}"
    made = await pair.respond(first, question, background=True)
    received = await pair.client(second).listens(Told(), f"/v1/responses/{made['id']}?stream=true")
    response = await pair.client(second).get(f"/v1/responses/{made['id']}")
    assert (received.done, response["status"]) == (True, "completed")
    assert fold(received.events).response == response
    assert response == await pair.client(first).get(f"/v1/responses/{made['id']}")
    assert len(prompts_about(pair.fake, question)) == 1


@BOTH_WAYS
async def test_a_background_response_of_one_version_is_cancelled_in_the_other(
    pair: Pair, first: str, second: str
) -> None:
    question = f"Cancelled, {first}. {UNFINISHED}"
    made = await pair.respond(first, question, background=True)
    await pair.generating(question)
    cancelled = await pair.client(second).post(f"/v1/responses/{made['id']}/cancel")
    assert cancelled["status"] == "cancelled"
    assert await pair.client(first).get(f"/v1/responses/{made['id']}") == cancelled


@BOTH_WAYS
async def test_an_idempotency_key_holds_for_both_versions(pair: Pair, first: str, second: str) -> None:
    body = {"model": "gpt-oss", "input": f"Once, {first}."}
    made = [
        await pair.client(version).post("/v1/responses", body, Idempotency_Key=f"once-{first}")
        for version in (first, second)
    ]
    assert made[0] == made[1]


@BOTH_WAYS
@pytest.mark.parametrize("how", ["kill", "end"])
async def test_one_version_takes_over_from_the_other(
    tmp_path: Path, redis_server: Server, earlier_environment: dict[str, str], first: str, second: str, how: str
) -> None:
    async with started(tmp_path, redis_server, earlier_environment) as pair:
        made = await pair.respond(first, UNFINISHED, background=True)
        await pair.generating(UNFINISHED)
        if how == "kill":
            pair.replicas[first].kill()
        else:
            pair.replicas[first].process.terminate()  # type: ignore[union-attr]
        await pair.replicas[first].ended()
        response = await pair.client(second).over(made["id"])
        assert response["status"] == "completed"
        assert response["output"][-1]["content"][0]["text"] == LONG.text
        received = await pair.client(second).resumes(Told(), made["id"])
        assert fold(received.events).response == response
        before, after = prompts_about(pair.fake, UNFINISHED)
        # The second version continues after the tokens that the first one stored.
        assert after[: len(before)] == before
        assert LONG.said(after) > 4


# -- keys, limits and usage


@BOTH_WAYS
async def test_requests_of_a_key_count_together(pair: Pair, first: str, second: str) -> None:
    _, key = await pair.ring.issue("", KeyLimits(rpm=4))
    answers = [await pair.status(version, key) for version in (first, second, first, second, first, second)]
    assert answers == [(200, "")] * 4 + [(429, "rate_limit_exceeded")] * 2


@BOTH_WAYS
async def test_a_budget_and_the_usage_count_together(pair: Pair, first: str, second: str) -> None:
    _, key = await pair.ring.issue("", KeyLimits(token_budget=300))
    answers = []
    for version in itertools.islice(itertools.cycle((first, second)), 20):
        answers.append(await pair.status(version, key))
        if answers[-1][0] != 200:
            break
    assert len(answers) > 3
    assert answers[-1] == (429, "insufficient_quota")
    assert (await pair.status(second, key), await pair.status(first, key)) == (answers[-1], answers[-1])
    usages = []
    for version in VERSIONS:
        status, usage = await pair.client(version).asks("GET", "/v1/usage", **bearing(key))
        assert status == 200
        usages.append(usage)
    assert usages[0] == usages[1]
    assert usages[0]["total"]["requests"] == len(answers) - 1
    assert 300 >= usages[0]["total"]["total_tokens"] > 200


@BOTH_WAYS
async def test_simultaneous_requests_count_together(pair: Pair, first: str, second: str) -> None:
    _, key = await pair.ring.issue("", KeyLimits(max_parallel=1))
    question = f"Parallel, {first}. {UNFINISHED}"
    body = {"model": "gpt-oss", "input": question}
    running = asyncio.create_task(pair.client(first).asks("POST", "/v1/responses", body, **bearing(key)))
    await pair.generating(question, tokens=2)
    assert await pair.status(second, key) == (429, "rate_limit_exceeded")
    assert (await running)[0] == 200
    assert await pair.status(second, key) == (200, "")


async def test_a_revoked_key_is_refused_by_both_versions(pair: Pair) -> None:
    record, key = await pair.ring.issue()
    assert [await pair.status(version, key) for version in VERSIONS] == [(200, "")] * 2
    await pair.ring.revoke(record)
    await asyncio.sleep(1.0)
    assert [await pair.status(version, key) for version in VERSIONS] == [(401, "invalid_api_key")] * 2
