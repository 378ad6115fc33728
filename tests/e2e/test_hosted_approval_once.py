"""One approval permits exactly one call, however often and wherever it is sent.

It can be sent again if it was not used for a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
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
from tests.mcp.conftest import Upstream

WIRE = WIRES["vllm"]
FIELD = "input.0.approval_request_id"


@pytest.fixture(params=["redis", "sqlite"])
async def pair(
    request: pytest.FixtureRequest, upstream: Upstream, redis_server: Server, tmp_path: Path
) -> AsyncIterator[tuple[Line, Line]]:
    """Two gateways with one store that require approval of every call."""
    url = redis_server.url if request.param == "redis" else f"sqlite:///{tmp_path}/state.db"
    shared = {"store": {"url": url, "deadline_s": 5, "lease_s": LEASE_S}}
    async with AsyncExitStack() as stack:
        first_gateway, second_gateway = [
            await stack.enter_async_context(desk(upstream, entry={"require_approval": "always"}, **shared))
            for _ in range(2)
        ]
        yield first_gateway, second_gateway


def approved(request: Json) -> list[Json]:
    return [{"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}]


async def asked_for(harness: Line, tool: str, **arguments: Any) -> tuple[Json, Json]:
    harness.say(calls(tool, **arguments))
    response = await harness.whole()
    [request] = made(response, "mcp_approval_request")
    return response, request


FORMS: dict[str, Json] = {"whole": {}, "streamed": {"stream": True}, "in the background": {"background": True}}


@pytest.mark.slow
@pytest.mark.parametrize("fields", FORMS.values(), ids=FORMS)
async def test_concurrent_approvals_on_two_gateways_make_one_call(
    pair: tuple[Line, Line], upstream: Upstream, fields: Json, request: pytest.FixtureRequest
) -> None:
    name = f"at once {request.node.callspec.id}"
    first, approval_request = await asked_for(pair[0], "slow", seconds=0.4, name=name)
    for line in pair:
        line.say(ANSWER)
    answer = {"previous_response_id": first["id"], "input": approved(approval_request), **fields}
    answers = await asyncio.gather(*(line.post(**answer) for line in (*pair, *pair)))
    await upstream.until_noted(f"slow ends {name}")
    assert upstream.noted(f"slow begins {name}") == [f"slow begins {name}"]
    accepted = [each for each in answers if each.status == 200]
    assert len(accepted) == 1
    for each in answers:
        if each is not accepted[0]:
            assert approval_request["id"] in refusal(each, 409, FIELD, "approval_used")
    if not fields:
        [call] = made(accepted[0].body)
        assert (call["output"], call["approval_request_id"]) == ("done", approval_request["id"])


async def test_later_repeated_approval_is_refused(pair: tuple[Line, Line], upstream: Upstream) -> None:
    name = f"later {id(pair)}"
    first, approval_request = await asked_for(pair[0], "echo", text=name)
    pair[1].say(ANSWER)
    second = await pair[1].whole(previous_response_id=first["id"], input=approved(approval_request))
    # Longer than the reservation of an approval for a starting response.
    await asyncio.sleep(1.2 * LEASE_S)
    for line in pair:
        again = await line.post(previous_response_id=first["id"], input=approved(approval_request))
        assert second["id"] in refusal(again, 409, FIELD, "approval_used")
    assert upstream.noted(name) == [f"echo {name}"]


async def test_approval_in_a_history_of_the_client_makes_one_call(pair: tuple[Line, Line], upstream: Upstream) -> None:
    pair[0].say(calls("echo", text=(name := f"carried {id(pair)}")))
    first = await pair[0].whole(store=False)
    [approval_request] = made(first, "mcp_approval_request")
    history = [{"role": "user", "content": "Hi"}, *first["output"], *approved(approval_request)]
    for line in pair:
        line.say(ANSWER)
    await pair[0].whole(input=history, store=False)
    again = await pair[1].post(input=history, store=False)
    refusal(again, 409, f"input.{len(history) - 1}.approval_request_id", "approval_used")
    assert upstream.noted(name) == [f"echo {name}"]


async def test_approval_of_a_refused_request_can_be_sent_again(pair: tuple[Line, Line], upstream: Upstream) -> None:
    first, _ = await asked_for(pair[0], "echo", text=(name := f"refused {id(pair)}"))
    # Answers to two requests are refused together if one of them is used already.
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


async def test_denial_does_not_use_the_approval(pair: tuple[Line, Line], upstream: Upstream) -> None:
    first, approval_request = await asked_for(pair[0], "echo", text=(name := f"denied {id(pair)}"))
    for line in pair:
        line.say(ANSWER)
    await pair[0].whole(previous_response_id=first["id"], input=[{**approved(approval_request)[0], "approve": False}])
    second = await pair[1].whole(previous_response_id=first["id"], input=approved(approval_request))
    assert [call["output"] for call in made(second)] == [name]
    assert upstream.noted(name) == [f"echo {name}"]


@pytest.mark.slow
async def test_approval_is_usable_after_a_crash_before_the_call(
    upstream: Upstream, redis_server: Server, tmp_path: Path
) -> None:
    """The process is killed while it waits for a tool server that never lists its tools."""
    store = {"url": redis_server.url, "deadline_s": 5, "lease_s": LEASE_S}

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()

    connected = asyncio.Event()
    async with (
        listening(never_answer) as silent,
        FakeVllm(tokens=[]) as fake,
        aiohttp.ClientSession() as session,
        desk(upstream, entry={"require_approval": "always"}, store=store) as harness,
    ):
        silent_server = {"url": f"{silent.url}/mcp", "require_approval": "always"}
        config = config_of(f"vllm@{fake.url}", store=store, mcp_servers={"docs": silent_server})
        async with replica(tmp_path / "a", config) as dying:
            first, approval_request = await asked_for(harness, "echo", text="survived")
            harness.say(ANSWER)
            answer = {"previous_response_id": first["id"], "input": approved(approval_request)}
            body = {"model": "gpt-oss", "tools": [DOCS], **answer}
            lost = asyncio.create_task(Client(dying.url, session).asks("POST", "/v1/responses", body))
            async with asyncio.timeout(20):
                await connected.wait()
            refusal(await harness.post(**answer), 409, FIELD, "approval_used")
            dying.kill()
            await dying.ended()
            with pytest.raises(aiohttp.ClientError):
                await lost
        await asyncio.sleep(1.2 * LEASE_S)
        second = await harness.whole(**answer)
        assert [call["output"] for call in made(second)] == ["survived"]
        assert upstream.noted("survived") == ["echo survived"]


@pytest.mark.sampled(one_in=2)
async def test_repeated_approval_is_refused_before_a_stream_starts(pair: tuple[Line, Line]) -> None:
    first, approval_request = await asked_for(pair[0], "echo", text="told")
    pair[0].say(ANSWER)
    answer = {"previous_response_id": first["id"], "input": approved(approval_request), "stream": True}
    assert streamed(await pair[0].post(**answer)).last["status"] == "completed"
    refusal(await pair[1].post(**answer), 409, FIELD, "approval_used")
