"""A client that leaves a plain response: the backend is free at once, so is the conversation, and nothing is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from tests.e2e.responses import ANSWER, CALL, THOUGHT, TOOL, Json, Line, line
from tests.e2e.wires import WIRES, Script, Wire, asked
from tests.fakes import stall_at

pytestmark = pytest.mark.asyncio(loop_scope="module")

AT_ONCE_S = 1.0
"""250 ms is the promise; the rest is for a busy machine. Whoever does not notice takes many times as long."""

PHASES: dict[str, Callable[[Wire], Script]] = {
    "before the backend answers": lambda wire: wire.silent(),
    "before the first token": lambda wire: wire.script(ANSWER, faults=(stall_at(0),)),
    "amid the reasoning": lambda wire: wire.script("<|channel|>analysis<|message|>" + "hm, " * 400, delay_s=0.01),
    "amid the answer": lambda wire: wire.script(THOUGHT + "<|channel|>final<|message|>" + "la " * 400, delay_s=0.01),
    "while the backend is silent": lambda wire: wire.script(ANSWER, faults=(stall_at(9),)),
    "while a call is held": lambda wire: wire.script(CALL[:-20] + "sky " * 400, delay_s=0.01),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WIRES.values(), ids=WIRES)
async def talk(request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    async with line(request.param) as here:
        yield here


async def come(talk: Line, **fields: object) -> asyncio.StreamWriter:
    """A client's bare connection with a request on it."""
    body = json.dumps({"model": "gpt-oss", "input": "Hi", "tools": [TOOL], **fields}).encode()
    host, _, port = talk.gateway.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    return writer


@pytest.mark.slow
@pytest.mark.parametrize("crash", [False, True], ids=["leaves", "crashes"])
@pytest.mark.parametrize("phase", PHASES.values(), ids=PHASES)
async def test_leaving_frees_the_backend_and_the_conversation_and_keeps_nothing(
    talk: Line, phase: Callable[[Wire], Script], crash: bool
) -> None:
    now = asyncio.get_running_loop().time
    conversations = [await talk.conversation() for _ in range(4)]
    talk.say(phase(talk.wire))
    ways: list[Json] = [
        {"stream": stream, "store": store, "conversation": conversation}
        for conversation, (stream, store) in zip(
            conversations, [(s, k) for s in (False, True) for k in (False, True)], strict=True
        )
    ]
    clients = [await come(talk, **way) for way in (*ways, {}, {"stream": True})]
    await talk.fake.asked(len(clients))
    await asyncio.sleep(0.08)
    for client in clients:
        (client.transport.abort if crash else client.close)()
    left = now()
    for index in range(len(clients)):
        assert await talk.fake.gone(index) - left < AT_ONCE_S
    assert all(request.done_at is None for request in asked(talk.fake))
    talk.say(ANSWER)
    for way, conversation in zip(ways, conversations, strict=True):
        assert await talk.items(conversation) == []
        async with asyncio.timeout(AT_ONCE_S):
            while (answer := await talk.post(**way)).status == 409:
                await asyncio.sleep(0.01)
        assert answer.status == 200
        assert len(await talk.items(conversation)) == 3


async def test_thirty_that_leave_are_forgotten(talk: Line) -> None:
    talk.say(*(phase(talk.wire) for phase in list(PHASES.values()) * 5))
    before = len(asyncio.all_tasks())
    clients = [await come(talk, stream=bool(n % 2), conversation=await talk.conversation()) for n in range(30)]
    await talk.fake.asked(30)
    await asyncio.sleep(0.05)
    for client in clients:
        client.close()
    async with asyncio.timeout(5):
        while len(asyncio.all_tasks()) > before:
            await asyncio.sleep(0.02)
