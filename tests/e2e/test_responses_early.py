"""Responses that cannot be stored are rejected before generation."""

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

STREAM_MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
# Half a mebibyte with few tokens.
WORDS = " international" * 35_000


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
    async with line(WIRES["vllm"], store={"url": urls[request.param], "deadline_s": 2.0}) as harness:
        yield harness


def message(text: str) -> Json:
    return {"role": "user", "content": text}


TOO_LARGE: dict[str, Json] = {
    "item": {"input": WORDS * 3},
    "one of several items": {"input": [message("Hi"), message(WORDS * 3)]},
    "many items": {"input": [message(WORDS)] * 10},
    "instructions": {"instructions": WORDS * 18},
}
# Fields that the errors name; an error about the whole response names none.
TOO_LARGE_FIELDS = {"item": "input.0", "one of several items": "input.1"}


@pytest.mark.sampled(one_in=2)
@STREAM_MODES
@pytest.mark.parametrize("name", TOO_LARGE)
async def test_state_that_is_too_large_is_rejected_before_generation(site: Line, name: str, stream: bool) -> None:
    site.say(ANSWER)
    refusal(await site.post(stream=stream, **TOO_LARGE[name]), 413, TOO_LARGE_FIELDS.get(name), code="state_too_large")
    assert site.prompts == []


async def test_unstored_input_may_be_larger_than_stored_input(site: Line) -> None:
    site.say(ANSWER)
    assert (await site.whole(store=False, input=WORDS * 3))["status"] == "completed"


UNWRITABLE_STORES = {
    "full": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
    "read-only": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNWRITABLE_STORES)
async def test_a_store_that_rejects_writes_causes_no_generation(server: Server, name: str) -> None:
    break_command, repair_command = UNWRITABLE_STORES[name]
    store = {"url": f"redis://127.0.0.1:{server.port}/0", "deadline_s": 2.0}
    async with line(WIRES["vllm"], store=store) as site:
        first = await site.whole()
        conversation = await site.conversation()
        site.fake.requests.clear()
        stateful: tuple[Json, ...] = (
            {},
            {"previous_response_id": first["id"]},
            {"input": [first["output"][-1], message("u")]},
            {"input": [{"type": "item_reference", "id": first["output"][-1]["id"]}, message("u")]},
            {"conversation": conversation},
            {"conversation": conversation, "store": False},
            {"background": True},
        )
        with redis.Redis(port=server.port) as client:
            client.execute_command(*break_command)
            try:
                requests = [{"stream": stream, **fields} for fields in stateful for stream in (False, True)]
                responses = await asyncio.gather(*(site.post(**request) for request in requests))
                unstored = await site.whole(previous_response_id=first["id"], store=False)
                prompt_count = len(site.prompts)
            finally:
                client.execute_command(*repair_command)
        for response in responses:
            refusal(response, 503, code="store_unavailable")
        assert unstored["status"] == "completed"
        assert prompt_count == 1
        assert (await site.whole(previous_response_id=first["id"]))["status"] == "completed"
