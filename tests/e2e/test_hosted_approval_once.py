"""One approval is for one call, however often and wherever it is answered; and one that came to nothing before its call
was made can be answered again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.contract.servers import Server
from tests.e2e.gateway import config_of
from tests.e2e.hosting import DOCS, calls, desk, made
from tests.e2e.replicas import LEASE_S, Client, replica
from tests.e2e.responses import ANSWER, Json, Line, refusal, streamed
from tests.e2e.wires import WIRES
from tests.fakes import FakeVllm
from tests.listening import listening
from tests.mcp.conftest import Upstream, start_upstream

WIRE = WIRES["vllm"]
FIELD = "input.0.approval_request_id"


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    with start_upstream(tmp_path_factory.mktemp("upstream")) as (_, found):
        yield found


@pytest.fixture(params=["redis", "sqlite"])
async def pair(
    request: pytest.FixtureRequest, upstream: Upstream, redis_server: Server, tmp_path: Path
) -> AsyncIterator[tuple[Line, Line]]:
    """Two gateways of one store, on which every call has to be approved."""
    url = redis_server.url if request.param == "redis" else f"sqlite:///{tmp_path}/state.db"
    shared = {"store": {"url": url, "deadline_s": 5, "lease_s": LEASE_S}}
    async with AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(desk(upstream, entry={"require_approval": "always"}, **shared))
            for _ in range(2)
        ]
        yield one, other


def approved(request: Json) -> list[Json]:
    return [{"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}]


async def asked_for(here: Line, tool: str, **arguments: Any) -> tuple[Json, Json]:
    here.say(calls(tool, **arguments))
    response = await here.whole()
    [request] = made(response, "mcp_approval_request")
    return response, request


WAYS: dict[str, Json] = {"whole": {}, "streamed": {"stream": True}, "in the background": {"background": True}}


@pytest.mark.slow
@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
async def test_answered_twice_at_once_on_two_gateways_it_is_one_call(
    pair: tuple[Line, Line], upstream: Upstream, fields: Json, request: pytest.FixtureRequest
) -> None:
    name = f"at once {request.node.callspec.id}"
    first, wanted = await asked_for(pair[0], "slow", seconds=0.4, name=name)
    for line in pair:
        line.say(ANSWER)
    answer = {"previous_response_id": first["id"], "input": approved(wanted), **fields}
    answers = await asyncio.gather(*(line.post(**answer) for line in (*pair, *pair)))
    await upstream.until_noted(f"slow ends {name}")
    assert upstream.noted(f"slow begins {name}") == [f"slow begins {name}"]
    taken = [each for each in answers if each.status == 200]
    assert len(taken) == 1
    for each in answers:
        if each is not taken[0]:
            assert wanted["id"] in refusal(each, 409, FIELD, "approval_used")
    if not fields:
        [call] = made(taken[0].body)
        assert (call["output"], call["approval_request_id"]) == ("done", wanted["id"])


async def test_answered_again_later_it_is_still_that_call(pair: tuple[Line, Line], upstream: Upstream) -> None:
    name = f"later {id(pair)}"
    first, wanted = await asked_for(pair[0], "echo", text=name)
    pair[1].say(ANSWER)
    second = await pair[1].whole(previous_response_id=first["id"], input=approved(wanted))
    # Longer than the approval is held for a response that only begins.
    await asyncio.sleep(1.2 * LEASE_S)
    for line in pair:
        again = await line.post(previous_response_id=first["id"], input=approved(wanted))
        assert second["id"] in refusal(again, 409, FIELD, "approval_used")
    assert upstream.noted(name) == [f"echo {name}"]


async def test_one_that_the_client_carries_is_one_call_too(pair: tuple[Line, Line], upstream: Upstream) -> None:
    pair[0].say(calls("echo", text=(name := f"carried {id(pair)}")))
    first = await pair[0].whole(store=False)
    [wanted] = made(first, "mcp_approval_request")
    history = [{"role": "user", "content": "Hi"}, *first["output"], *approved(wanted)]
    for line in pair:
        line.say(ANSWER)
    await pair[0].whole(input=history, store=False)
    again = await pair[1].post(input=history, store=False)
    refusal(again, 409, f"input.{len(history) - 1}.approval_request_id", "approval_used")
    assert upstream.noted(name) == [f"echo {name}"]


async def test_what_is_refused_before_the_call_can_be_answered_again(
    pair: tuple[Line, Line], upstream: Upstream
) -> None:
    first, _ = await asked_for(pair[0], "echo", text=(name := f"refused {id(pair)}"))
    # The answers to two requests, of which one is used already, are refused together.
    both = calls("echo", text=f"{name} b") + "<|start|>assistant" + calls("echo", "", text=f"{name} c")
    pair[0].say(both)
    last = await pair[0].whole(previous_response_id=first["id"], input="Others")
    one, two = made(last, "mcp_approval_request")
    pair[0].say(ANSWER)
    await pair[0].whole(previous_response_id=last["id"], input=approved(one))
    refused = await pair[0].post(previous_response_id=last["id"], input=[*approved(two), *approved(one)])
    refusal(refused, 409, "input.1.approval_request_id", "approval_used")
    await pair[0].whole(previous_response_id=last["id"], input=approved(two))
    assert upstream.noted(name) == [f"echo {name} b", f"echo {name} c"]


async def test_a_denial_uses_nothing_up(pair: tuple[Line, Line], upstream: Upstream) -> None:
    first, wanted = await asked_for(pair[0], "echo", text=(name := f"denied {id(pair)}"))
    for line in pair:
        line.say(ANSWER)
    await pair[0].whole(previous_response_id=first["id"], input=[{**approved(wanted)[0], "approve": False}])
    second = await pair[1].whole(previous_response_id=first["id"], input=approved(wanted))
    assert [call["output"] for call in made(second)] == [name]
    assert upstream.noted(name) == [f"echo {name}"]


@pytest.mark.slow
async def test_a_gateway_that_dies_before_the_call_leaves_the_approval(
    upstream: Upstream, redis_server: Server, tmp_path: Path
) -> None:
    """It waits for a tool server that never lists its tools, and is killed there."""
    store = {"url": redis_server.url, "deadline_s": 5, "lease_s": LEASE_S}

    async def nobody(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        await reader.read()

    came = asyncio.Event()
    async with (
        listening(nobody) as silent,
        FakeVllm(tokens=[]) as fake,
        aiohttp.ClientSession() as session,
        desk(upstream, entry={"require_approval": "always"}, store=store) as here,
    ):
        deaf = {"url": f"{silent.url}/mcp", "require_approval": "always"}
        config = config_of(f"vllm@{fake.url}", store=store, mcp_servers={"docs": deaf})
        async with replica(tmp_path / "a", config) as dying:
            first, wanted = await asked_for(here, "echo", text="survived")
            here.say(ANSWER)
            answer = {"previous_response_id": first["id"], "input": approved(wanted)}
            body = {"model": "gpt-oss", "tools": [DOCS], **answer}
            lost = asyncio.create_task(Client(dying.url, session).asks("POST", "/v1/responses", body))
            async with asyncio.timeout(20):
                await came.wait()
            refusal(await here.post(**answer), 409, FIELD, "approval_used")
            dying.kill()
            await dying.ended()
            with pytest.raises(aiohttp.ClientError):
                await lost
        await asyncio.sleep(1.2 * LEASE_S)
        second = await here.whole(**answer)
        assert [call["output"] for call in made(second)] == ["survived"]
        assert upstream.noted("survived") == ["echo survived"]


async def test_a_stream_tells_it_before_it_begins(pair: tuple[Line, Line]) -> None:
    first, wanted = await asked_for(pair[0], "echo", text="told")
    pair[0].say(ANSWER)
    answer = {"previous_response_id": first["id"], "input": approved(wanted), "stream": True}
    assert streamed(await pair[0].post(**answer)).last["status"] == "completed"
    refusal(await pair[1].post(**answer), 409, FIELD, "approval_used")
