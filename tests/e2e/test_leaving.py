"""A client that goes away frees the backend at once, in whatever phase, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.gateway import Gateway, gateway, message_of
from tests.e2e.wires import ANSWERING, DONE, PHASES, WIRES, Fake, Script, Wire, asked, deployment
from tests.fakes import stall_at

AT_ONCE_S = 1.0
"""250 ms is the promise, and what an idle machine needs is a few; the rest is for a busy one. Whoever does not notice
takes many times as long."""
LONG_TEXT = "中文字符" * 100_000
"""So much that rendering it takes a thread a good part of a second."""
WINDOW = 10_000_000

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Site:
    """`gpt-oss` is served without a limit, `gpt-oss-narrow` to one client at a time."""

    wire: Wire
    fake: Fake
    gateway: Gateway

    def behave(self, script: Script) -> None:
        self.fake.script = lambda asked: script  # type: ignore[assignment]
        self.fake.requests.clear()

    async def come(self, **fields: Any) -> Client:
        return await Client.asking(self.gateway, **fields)


@dataclass
class Client:
    """A client's bare connection with a request on it. `leave` closes it, `crash` resets it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @staticmethod
    async def asking(running: Gateway, *, cut: int = 0, **fields: Any) -> Client:
        """Send a chat request, all but the last `cut` bytes of its body."""
        body = json.dumps({"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}], **fields}).encode()
        host, _, port = running.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body[: len(body) - cut])
        return Client(reader, writer)

    def leave(self) -> float:
        """When it left, in the loop's time."""
        self.writer.close()
        return asyncio.get_running_loop().time()

    def crash(self) -> float:
        self.writer.transport.abort()
        return asyncio.get_running_loop().time()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WIRES.values(), ids=WIRES)
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    wire: Wire = request.param
    async with wire.fake(context=WINDOW) as fake:
        entries = [
            # A window for any text: what does not fit asks no backend either.
            {**deployment("gpt-oss", wire, fake), "model_info": {"max_input_tokens": WINDOW}},
            deployment("gpt-oss-narrow", wire, fake, max_parallel_requests=1),
        ]
        async with gateway({"model_list": entries}) as running:
            yield Site(wire, fake, running)


async def begun(site: Site, choices: int = 1) -> None:
    """The backend is at work, and some of the answer has come where it comes in pieces."""
    await site.fake.asked(choices)
    await asyncio.sleep(0.08)


WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "stream": {"stream": True},
    "three, whole": {"n": 3},
    "three, stream": {"n": 3, "stream": True},
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("phase", PHASES.values(), ids=PHASES)
async def test_leaving_frees_the_backend_at_once(
    site: Site, phase: Callable[[Wire], Script], fields: dict[str, Any]
) -> None:
    site.behave(phase(site.wire))
    choices = fields.get("n", 1)
    for go in (Client.leave, Client.crash):
        site.fake.requests.clear()
        client = await site.come(**fields)
        await begun(site, choices)
        left = go(client)
        for index in range(choices):
            assert await site.fake.gone(index) - left < AT_ONCE_S
        assert all(request.done_at is None for request in asked(site.fake))


@pytest.mark.slow
async def test_leaving_while_a_thread_renders_asks_no_backend(site: Site) -> None:
    site.behave(site.wire.script(ANSWERING, faults=(stall_at(9),)))
    now = asyncio.get_running_loop().time
    # How long it takes when nobody leaves.
    began = now()
    stays = await site.come(messages=[heavy_message(site)])
    await site.fake.asked()
    took = now() - began
    assert took > 0.05
    stays.leave()
    await site.fake.gone()
    site.fake.requests.clear()
    for part, stream in ((0.1, True), (0.35, False)):
        client = await site.come(messages=[heavy_message(site)], stream=stream)
        await asyncio.sleep(part * took)
        client.leave()
        await asyncio.sleep(took)
    assert asked(site.fake) == []


SERIAL = itertools.count()


def heavy_message(site: Site) -> dict[str, str]:
    """Another one each time: what was rendered once is remembered."""
    return {"role": "user", "content": f"{next(SERIAL)} {LONG_TEXT}"}


async def test_leaving_amid_the_own_body_asks_no_backend(site: Site) -> None:
    site.behave(site.wire.script(DONE))
    for go in (Client.leave, Client.crash):
        client = await site.come(cut=10)
        await asyncio.sleep(0.02)
        go(client)
    await asyncio.sleep(0.05)
    assert asked(site.fake) == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_leaving_the_line_makes_room_in_it(site: Site, stream: bool) -> None:
    site.behave(site.wire.script(ANSWERING, faults=(stall_at(9),)))
    first = await site.come(model="gpt-oss-narrow", stream=stream)
    await begun(site)
    waiting = [await site.come(model="gpt-oss-narrow", stream=stream) for _ in range(3)]
    await asyncio.sleep(0.05)
    for client in waiting:
        client.leave()
    await asyncio.sleep(0.05)
    assert len(asked(site.fake)) == 1
    site.fake.script = lambda asked: site.wire.script(DONE)  # type: ignore[assignment]
    left = first.leave()
    assert await site.fake.gone(0) - left < AT_ONCE_S
    async with asyncio.timeout(2):
        assert message_of(await site.gateway.chat(model="gpt-oss-narrow")).content == "Done."
    assert len(asked(site.fake)) == 2


async def test_a_client_that_leaves_a_finished_answer_lying_is_no_fault(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.behave(site.wire.script(DONE))
    for stream in (False, True):
        client = await site.come(stream=stream)
        await site.fake.asked()
        await asyncio.sleep(0.05)
        client.crash()
    await asyncio.sleep(0.05)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.slow
@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
async def test_thirty_that_left_leave_nothing_behind(
    site: Site, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    await come_and_go(site, fields, 2)
    before = possessions()
    await come_and_go(site, fields, 30)
    async with asyncio.timeout(5):
        while exceeding(before):
            await asyncio.sleep(0.02)
    # Probes while requests wait get the answers that were meant for clients.
    bad = [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]
    assert [record for record in bad if record.msg != "backend check failed"] == []


async def come_and_go(site: Site, fields: dict[str, Any], times: int) -> None:
    """Clients that leave in every phase in turn, several at the same time."""
    scripts = [phase(site.wire) for phase in PHASES.values()]
    turn = iter(range(10**6))
    site.fake.script = lambda asked: scripts[next(turn) % len(scripts)]  # type: ignore[assignment]
    site.fake.requests.clear()
    clients = [await site.come(**fields) for _ in range(times)]
    await site.fake.asked(times * fields.get("n", 1))
    await asyncio.sleep(0.1)
    for position, client in enumerate(clients):
        (Client.crash if position % 2 else Client.leave)(client)
    for client in clients:
        await asyncio.gather(client.writer.wait_closed(), return_exceptions=True)


def possessions() -> dict[str, int]:
    """What one process holds: client, gateway and fake backend are all of them in it."""
    gc.collect()
    return {
        "tasks": len(asyncio.all_tasks()),
        "descriptors": sum(1 for _ in Path("/dev/fd").iterdir()),
    }


def exceeding(before: dict[str, int]) -> bool:
    now = possessions()
    return any(now[name] > before[name] for name in before)
