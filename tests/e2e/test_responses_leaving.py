"""A client that disconnects from a foreground response frees its backend and conversation.

Nothing of the response is stored.
"""

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

# The target is 250 ms; the rest is for a busy machine. Without detection it takes many times as long.
ABORT_LIMIT_S = 1.0

PHASES: dict[str, Callable[[Wire], Script]] = {
    "before the backend answers": lambda wire: wire.silent(),
    "before the first token": lambda wire: wire.script(ANSWER, faults=(stall_at(0),)),
    "during the reasoning": lambda wire: wire.script("<|channel|>analysis<|message|>" + "hm, " * 400, delay_s=0.01),
    "during the answer": lambda wire: wire.script(THOUGHT + "<|channel|>final<|message|>" + "la " * 400, delay_s=0.01),
    "while the backend is silent": lambda wire: wire.script(ANSWER, faults=(stall_at(9),)),
    "while a call is buffered": lambda wire: wire.script(CALL[:-20] + "sky " * 400, delay_s=0.01),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WIRES.values(), ids=WIRES)
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Line]:
    async with line(request.param) as running:
        yield running


async def send_request(harness: Line, **fields: object) -> asyncio.StreamWriter:
    """Send a request on a raw connection and return its writer."""
    body = json.dumps({"model": "gpt-oss", "input": "Hi", "tools": [TOOL], **fields}).encode()
    host, _, port = harness.gateway.url.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    return writer


@pytest.mark.slow
@pytest.mark.parametrize("crash", [False, True], ids=["closes", "resets"])
@pytest.mark.parametrize("phase", PHASES.values(), ids=PHASES)
async def test_a_disconnect_frees_backend_and_conversation_and_stores_nothing(
    harness: Line, phase: Callable[[Wire], Script], crash: bool
) -> None:
    now = asyncio.get_running_loop().time
    conversations = [await harness.conversation() for _ in range(4)]
    harness.say(phase(harness.wire))
    requests: list[Json] = [
        {"stream": stream, "store": store, "conversation": conversation}
        for conversation, (stream, store) in zip(
            conversations, [(s, k) for s in (False, True) for k in (False, True)], strict=True
        )
    ]
    clients = [await send_request(harness, **fields) for fields in (*requests, {}, {"stream": True})]
    await harness.fake.asked(len(clients))
    await asyncio.sleep(0.08)
    for client in clients:
        (client.transport.abort if crash else client.close)()
    left_at = now()
    for index in range(len(clients)):
        assert await harness.fake.gone(index) - left_at < ABORT_LIMIT_S
    assert all(request.done_at is None for request in asked(harness.fake))
    harness.say(ANSWER)
    for fields, conversation in zip(requests, conversations, strict=True):
        assert await harness.items(conversation) == []
        async with asyncio.timeout(ABORT_LIMIT_S):
            while (response := await harness.post(**fields)).status == 409:
                await asyncio.sleep(0.01)
        assert response.status == 200
        assert len(await harness.items(conversation)) == 3


@pytest.mark.sampled(one_in=2)
async def test_thirty_disconnects_leave_no_tasks(harness: Line) -> None:
    harness.say(*(phase(harness.wire) for phase in list(PHASES.values()) * 5))
    before = len(asyncio.all_tasks())
    clients = [
        await send_request(harness, stream=bool(n % 2), conversation=await harness.conversation()) for n in range(30)
    ]
    await harness.fake.asked(30)
    await asyncio.sleep(0.05)
    for client in clients:
        client.close()
    async with asyncio.timeout(5):
        while len(asyncio.all_tasks()) > before:
            await asyncio.sleep(0.02)
