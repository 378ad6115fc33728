"""Responses while the store stalls, dies or loses replies.

Requests that need no state succeed, and no response claims to be stored if it is not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Self

import pytest
import pytest_asyncio

from tests.contract.servers import Server
from tests.e2e.responses import ANSWER, Json, Line, line, refusal, streamed, text_of
from tests.e2e.wires import WIRES
from tests.listening import Listener, connected

pytestmark = pytest.mark.asyncio(loop_scope="module")

STREAM_MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
DEADLINE_S = 0.25
# Two operations that time out, and a margin for a busy machine.
REJECTION_LIMIT_S = 2 * DEADLINE_S + 0.5


# Background responses are started with several attempts.
BACKGROUND_LIMIT_S = 3.0


class Fault(Enum):
    NONE = auto()
    # Nothing is forwarded.
    STALLED = auto()
    # Commands reach the server, replies are lost.
    MUTE = auto()
    # Connections break, and new ones are refused.
    GONE = auto()


class FaultyProxy:
    """A loopback proxy to a server with a fault that a test selects."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._fault = Fault.NONE
        self._changed = asyncio.Condition()
        self._listener = Listener(self._connected)
        # Number of chunks from the client.
        self.chunk_count = 0
        # From the first chunk with these bytes on, replies are lost and `muted` is set.
        self.mute_after: bytes | None = None
        self.muted = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self._listener.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._listener.aclose()

    @property
    def port(self) -> int:
        return self._listener.port

    async def set_fault(self, fault: Fault) -> None:
        async with self._changed:
            self._fault = fault
            self._changed.notify_all()
        if fault is not Fault.STALLED:
            # Lost or delayed data must not arrive later.
            await self._listener.cut()
            await asyncio.sleep(0.02)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._fault is Fault.GONE:
            writer.transport.abort()
            return
        async with connected(self._to) as (server_reader, server_writer):
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._forward(reader, server_writer, up=True))
                    tasks.create_task(self._forward(server_reader, writer, up=False))
            except* OSError:
                writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        while data := await reader.read(1 << 16):
            if up:
                self.chunk_count += 1
                if self.mute_after is not None and self.mute_after in data:
                    self._fault, self.mute_after = Fault.MUTE, None
                    self.muted.set()
            async with self._changed:
                await self._changed.wait_for(lambda: self._fault is not Fault.STALLED)
            if up or self._fault is not Fault.MUTE:
                writer.write(data)
        raise ConnectionResetError


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultyProxy]:
    server = Server(tmp_path_factory.mktemp("redis"), ("appendonly yes", "maxmemory-policy noeviction"))
    try:
        await asyncio.to_thread(server.start)
        async with FaultyProxy(server.port) as proxy:
            yield proxy
    finally:
        server.end()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(proxy: FaultyProxy) -> AsyncIterator[Line]:
    store = {"url": f"redis://127.0.0.1:{proxy.port}/0", "deadline_s": DEADLINE_S, "lease_s": 1.0}
    async with line(WIRES["vllm"], store=store) as harness:
        yield harness


@pytest_asyncio.fixture(loop_scope="module")
async def harness(site: Line, proxy: FaultyProxy) -> AsyncIterator[Line]:
    site.say(ANSWER)
    yield site
    proxy.mute_after = None
    proxy.muted.clear()
    await proxy.set_fault(Fault.NONE)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


FAULTS = pytest.mark.parametrize(
    "fault", [Fault.STALLED, Fault.MUTE, Fault.GONE], ids=lambda fault: str(fault.name).lower()
)


@FAULTS
async def test_stateless_requests_succeed_and_others_fail_fast_during_a_fault(
    harness: Line, proxy: FaultyProxy, fault: Fault
) -> None:
    first = await harness.whole()
    conversation = await harness.conversation()
    harness.fake.requests.clear()
    await proxy.set_fault(fault)
    for stream in (False, True):
        with within(REJECTION_LIMIT_S):
            response = await harness.responds(stream=stream, store=False, tools=[])
        assert text_of(response) == "ok"
        with within(REJECTION_LIMIT_S):
            history = [{"role": "user", "content": "Hi"}, *response["output"], {"role": "user", "content": "u"}]
            assert (await harness.responds(stream=stream, store=False, input=history))["status"] == "completed"
    assert len(harness.prompts) == 4
    stateful: tuple[Json, ...] = (
        {},
        {"previous_response_id": first["id"]},
        {"previous_response_id": first["id"], "store": False},
        {"conversation": conversation},
        {"conversation": conversation, "store": False},
        {"input": [{"type": "item_reference", "id": first["output"][0]["id"]}], "store": False},
    )
    with within(REJECTION_LIMIT_S):
        requests = [{"stream": stream, **fields} for fields in stateful for stream in (False, True)]
        responses = await asyncio.gather(
            *(harness.post(**request) for request in requests), harness.get(f"/responses/{first['id']}")
        )
    with within(BACKGROUND_LIMIT_S):
        key = {"idempotency-key": f"k {fault}"}
        responses += await asyncio.gather(harness.post(background=True), harness.post(headers=key))
    for reply in responses:
        refusal(reply, 503, code="store_unavailable")
        assert int(reply.headers["retry-after"]) >= 1
    assert len(harness.prompts) == 4
    await proxy.set_fault(Fault.NONE)
    async with asyncio.timeout(5):
        while (await harness.post(conversation=conversation)).status != 200:
            # The store's reply about the lease was lost; the lease expires.
            await asyncio.sleep(0.1)
    assert len(await harness.items(conversation)) == 3
    assert await harness.kept(first) == first
    assert (await harness.post(headers=key)).status == 200


@pytest.mark.slow
@FAULTS
async def test_a_response_that_cannot_be_stored_at_the_end_has_failed(
    harness: Line, proxy: FaultyProxy, fault: Fault
) -> None:
    harness.say(ANSWER, delay_s=0.02)
    conversations = [await harness.conversation() for _ in range(2)]
    requests: list[Json] = [
        {"stream": stream, **state}
        for stream, conversation in zip((False, True), conversations, strict=True)
        for state in ({}, {"conversation": conversation})
    ]
    tasks = [asyncio.create_task(harness.post(**request)) for request in requests]
    await harness.fake.asked(len(requests))
    await proxy.set_fault(fault)
    replies = await asyncio.gather(*tasks)
    await proxy.set_fault(Fault.NONE)
    for request, reply in zip(requests, replies, strict=True):
        if not request["stream"]:
            refusal(reply, 503, code="store_unavailable")
            continue
        stream = streamed(reply)
        assert stream.types[-2:] == ["error", "response.failed"]
        assert stream.events[-2]["code"] == "store_unavailable"
        assert stream.last["error"]["code"] == "server_error"
        stored = await harness.get(f"/responses/{stream.last['id']}")
        # Either nothing was stored, or everything was and only the reply was lost or late.
        assert stored.status == 404 or (fault is not Fault.GONE and stored.body["status"] == "completed")
    for conversation in conversations:
        items = [item["type"] for item in await harness.items(conversation)]
        assert items in ([], ["message", "reasoning", "message"])
        assert items == [] or fault is not Fault.GONE


@STREAM_MODES
@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "in its conversation only"])
async def test_a_write_with_a_lost_reply_is_retried_and_applied_once(
    harness: Line, proxy: FaultyProxy, is_stored: bool, stream: bool
) -> None:
    conversation = await harness.conversation()
    harness.say(ANSWER, delay_s=0.02)
    task = asyncio.create_task(harness.responds(stream=stream, conversation=conversation, store=is_stored))
    await harness.fake.asked()
    proxy.mute_after = b"EVALSHA"
    async with asyncio.timeout(5):
        await proxy.muted.wait()
    await asyncio.sleep(0.05)
    await proxy.set_fault(Fault.NONE)
    response = await task
    assert response["status"] == "completed"
    items = await harness.items(conversation)
    assert items[1:] == response["output"]
    if is_stored:
        assert await harness.kept(response) == response
