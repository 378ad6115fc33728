"""A store that stalls, dies or loses its answers: what needs no state is answered, and nothing is said to be kept that
is not."""

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

WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
DEADLINE_S = 0.25
AT_ONCE_S = 2 * DEADLINE_S + 0.5
"""Two operations that time out, and what a busy machine adds."""


PATIENT_S = 3.0
"""What runs in the background is begun in several tries."""


class Trouble(Enum):
    NONE = auto()
    STALLED = auto()
    """Nothing goes through."""
    MUTE = auto()
    """What is asked arrives, what is answered does not."""
    GONE = auto()
    """Connections break, and new ones are refused."""


class Gate:
    """A loopback connection to a server, in whatever trouble a test wants."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._trouble = Trouble.NONE
        self._changed = asyncio.Condition()
        self._listener = Listener(self._joined)
        self.asked = 0
        """Pieces that came for the server."""
        self.mute_after: bytes | None = None
        """From the first piece on that holds this, answers are lost, and `muted` is set."""
        self.muted = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self._listener.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._listener.aclose()

    @property
    def port(self) -> int:
        return self._listener.port

    async def be(self, trouble: Trouble) -> None:
        async with self._changed:
            self._trouble = trouble
            self._changed.notify_all()
        if trouble is not Trouble.STALLED:
            # What was lost or held does not come later after all.
            await self._listener.cut()
            await asyncio.sleep(0.02)

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._trouble is Trouble.GONE:
            writer.transport.abort()
            return
        async with connected(self._to) as (there, here):
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pass(reader, here, up=True))
                    both.create_task(self._pass(there, writer, up=False))
            except* OSError:
                writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        while data := await reader.read(1 << 16):
            if up:
                self.asked += 1
                if self.mute_after is not None and self.mute_after in data:
                    self._trouble, self.mute_after = Trouble.MUTE, None
                    self.muted.set()
            async with self._changed:
                await self._changed.wait_for(lambda: self._trouble is not Trouble.STALLED)
            if up or self._trouble is not Trouble.MUTE:
                writer.write(data)
        raise ConnectionResetError


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gate(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gate]:
    server = Server(tmp_path_factory.mktemp("redis"), ("appendonly yes", "maxmemory-policy noeviction"))
    try:
        await asyncio.to_thread(server.start)
        async with Gate(server.port) as gate:
            yield gate
    finally:
        server.end()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(gate: Gate) -> AsyncIterator[Line]:
    store = {"url": f"redis://127.0.0.1:{gate.port}/0", "deadline_s": DEADLINE_S, "lease_s": 1.0}
    async with line(WIRES["vllm"], store=store) as here:
        yield here


@pytest_asyncio.fixture(loop_scope="module")
async def talk(site: Line, gate: Gate) -> AsyncIterator[Line]:
    site.say(ANSWER)
    yield site
    gate.mute_after = None
    gate.muted.clear()
    await gate.be(Trouble.NONE)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < seconds


TROUBLES = pytest.mark.parametrize(
    "trouble", [Trouble.STALLED, Trouble.MUTE, Trouble.GONE], ids=lambda trouble: str(trouble.name).lower()
)


@TROUBLES
async def test_what_needs_no_state_is_answered_and_the_rest_refused_at_once(
    talk: Line, gate: Gate, trouble: Trouble
) -> None:
    first = await talk.whole()
    conversation = await talk.conversation()
    talk.fake.requests.clear()
    await gate.be(trouble)
    for stream in (False, True):
        with within(AT_ONCE_S):
            response = await talk.responds(stream=stream, store=False, tools=[])
        assert text_of(response) == "ok"
        with within(AT_ONCE_S):
            again = [{"role": "user", "content": "Hi"}, *response["output"], {"role": "user", "content": "u"}]
            assert (await talk.responds(stream=stream, store=False, input=again))["status"] == "completed"
    assert len(talk.prompts) == 4
    needing: tuple[Json, ...] = (
        {},
        {"previous_response_id": first["id"]},
        {"previous_response_id": first["id"], "store": False},
        {"conversation": conversation},
        {"conversation": conversation, "store": False},
        {"input": [{"type": "item_reference", "id": first["output"][0]["id"]}], "store": False},
    )
    with within(AT_ONCE_S):
        ways = [{"stream": stream, **fields} for fields in needing for stream in (False, True)]
        answers = await asyncio.gather(*(talk.post(**way) for way in ways), talk.get(f"/responses/{first['id']}"))
    with within(PATIENT_S):
        key = {"idempotency-key": f"k {trouble}"}
        answers += await asyncio.gather(talk.post(background=True), talk.post(headers=key))
    for answer in answers:
        refusal(answer, 503, code="store_unavailable")
        assert int(answer.headers["retry-after"]) >= 1
    assert len(talk.prompts) == 4
    await gate.be(Trouble.NONE)
    async with asyncio.timeout(5):
        while (await talk.post(conversation=conversation)).status != 200:
            # Whether the lease was taken was never heard: it ends by itself.
            await asyncio.sleep(0.1)
    assert len(await talk.items(conversation)) == 3
    assert await talk.kept(first) == first
    assert (await talk.post(headers=key)).status == 200


@pytest.mark.slow
@TROUBLES
async def test_what_cannot_be_kept_in_the_end_has_failed(talk: Line, gate: Gate, trouble: Trouble) -> None:
    talk.say(ANSWER, delay_s=0.02)
    conversations = [await talk.conversation() for _ in range(2)]
    ways: list[Json] = [
        {"stream": stream, **where}
        for stream, conversation in zip((False, True), conversations, strict=True)
        for where in ({}, {"conversation": conversation})
    ]
    asking = [asyncio.create_task(talk.post(**way)) for way in ways]
    await talk.fake.asked(len(ways))
    await gate.be(trouble)
    answers = await asyncio.gather(*asking)
    await gate.be(Trouble.NONE)
    for way, answer in zip(ways, answers, strict=True):
        if not way["stream"]:
            refusal(answer, 503, code="store_unavailable")
            continue
        told = streamed(answer)
        assert told.types[-2:] == ["error", "response.failed"]
        assert told.events[-2]["code"] == "store_unavailable"
        assert told.last["error"]["code"] == "server_error"
        found = await talk.get(f"/responses/{told.last['id']}")
        # Nothing arrived; or all of it did, and only the word of it was lost or late.
        assert found.status == 404 or (trouble is not Trouble.GONE and found.body["status"] == "completed")
    for conversation in conversations:
        items = [item["type"] for item in await talk.items(conversation)]
        assert items in ([], ["message", "reasoning", "message"])
        assert items == [] or trouble is not Trouble.GONE


@WAYS
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "in its conversation only"])
async def test_a_write_whose_answer_was_lost_is_repeated_and_done_once(
    talk: Line, gate: Gate, kept: bool, stream: bool
) -> None:
    conversation = await talk.conversation()
    talk.say(ANSWER, delay_s=0.02)
    asking = asyncio.create_task(talk.responds(stream=stream, conversation=conversation, store=kept))
    await talk.fake.asked()
    gate.mute_after = b"EVALSHA"
    async with asyncio.timeout(5):
        await gate.muted.wait()
    await asyncio.sleep(0.05)
    await gate.be(Trouble.NONE)
    response = await asking
    assert response["status"] == "completed"
    items = await talk.items(conversation)
    assert items[1:] == response["output"]
    if kept:
        assert await talk.kept(response) == response
