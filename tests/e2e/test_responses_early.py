"""What could not be kept is refused before a model is asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import redis

from tests.contract.servers import Server
from tests.e2e.responses import ANSWER, Json, Line, line, refusal
from tests.e2e.wires import WIRES

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
WORDS = " international" * 35_000
"""Half a mebibyte, and not many tokens."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"), ("appendonly yes", "maxmemory-policy noeviction"))
    try:
        yield server.start()
    finally:
        server.end()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["redis", "sqlite"])
async def site(request: pytest.FixtureRequest, server: Server) -> AsyncIterator[Line]:
    urls = {"redis": f"redis://127.0.0.1:{server.port}/0", "sqlite": "memory://"}
    async with line(WIRES["vllm"], store={"url": urls[request.param], "deadline_s": 2.0}) as here:
        yield here


def message(text: str) -> Json:
    return {"role": "user", "content": text}


TOO_LARGE: dict[str, Json] = {
    "an item": {"input": WORDS * 3},
    "one item of many": {"input": [message("Hi"), message(WORDS * 3)]},
    "many items": {"input": [message(WORDS)] * 10},
    "the instructions": {"instructions": WORDS * 18},
}


@WAYS
@pytest.mark.parametrize("name", TOO_LARGE)
async def test_what_is_too_large_to_be_kept_is_refused_before_it_is_generated(
    site: Line, name: str, stream: bool
) -> None:
    site.say(ANSWER)
    refusal(await site.post(stream=stream, **TOO_LARGE[name]), 413, code="state_too_large")
    assert site.prompts == []


async def test_what_is_not_to_be_kept_may_be_larger(site: Line) -> None:
    site.say(ANSWER)
    assert (await site.whole(store=False, input=WORDS * 3))["status"] == "completed"


UNWRITABLE = {
    "full": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
    "read-only": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNWRITABLE)
async def test_a_store_that_can_be_read_but_not_written_costs_no_generation(server: Server, name: str) -> None:
    breaking, mending = UNWRITABLE[name]
    store = {"url": f"redis://127.0.0.1:{server.port}/0", "deadline_s": 2.0}
    async with line(WIRES["vllm"], store=store) as site:
        first = await site.whole()
        conversation = await site.conversation()
        site.fake.requests.clear()
        needing: tuple[Json, ...] = (
            {},
            {"previous_response_id": first["id"]},
            {"input": [first["output"][-1], message("u")]},
            {"input": [{"type": "item_reference", "id": first["output"][-1]["id"]}, message("u")]},
            {"conversation": conversation},
            {"conversation": conversation, "store": False},
            {"background": True},
        )
        with redis.Redis(port=server.port) as client:
            client.execute_command(*breaking)
            try:
                ways = [{"stream": stream, **fields} for fields in needing for stream in (False, True)]
                answers = await asyncio.gather(*(site.post(**way) for way in ways))
                passing = await site.whole(previous_response_id=first["id"], store=False)
                seen = len(site.prompts)
            finally:
                client.execute_command(*mending)
        for answer in answers:
            refusal(answer, 503, code="store_unavailable")
        assert passing["status"] == "completed"
        assert seen == 1
        assert (await site.whole(previous_response_id=first["id"]))["status"] == "completed"
