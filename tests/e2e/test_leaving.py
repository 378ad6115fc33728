"""A client that disconnects in any phase frees the backend at once and leaks nothing."""

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

# The target is 250 ms and an idle machine needs a few; the rest is for a busy machine. Without detection it takes many
# times as long.
ABORT_LIMIT_S = 1.0
# Rendering it takes a thread a good part of a second.
LONG_TEXT = "中文字符" * 100_000
WINDOW = 10_000_000

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Site:
    """A gateway; `gpt-oss` has no limit, `gpt-oss-narrow` accepts one request at a time."""

    wire: Wire
    fake: Fake
    gateway: Gateway

    def script_backend(self, script: Script) -> None:
        self.fake.script = lambda body: script  # type: ignore[assignment]
        self.fake.requests.clear()

    async def connect(self, **fields: Any) -> Client:
        return await Client.send(self.gateway, **fields)


@dataclass
class Client:
    """A raw client connection with a request. `leave` closes it, `crash` resets it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @staticmethod
    async def send(running: Gateway, *, cut: int = 0, **fields: Any) -> Client:
        """Send a chat request without the last `cut` bytes of its body."""
        body = json.dumps({"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}], **fields}).encode()
        host, _, port = running.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body[: len(body) - cut])
        return Client(reader, writer)

    def leave(self) -> float:
        """Close the connection and return the time of the event loop."""
        self.writer.close()
        return asyncio.get_running_loop().time()

    def crash(self) -> float:
        self.writer.transport.abort()
        return asyncio.get_running_loop().time()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WIRES.values(), ids=WIRES)
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    wire: Wire = request.param
    async with wire.fake(context=WINDOW) as fake:
        deployments = [
            # The window fits any text; a prompt that does not fit would not reach the backend.
            {**deployment("gpt-oss", wire, fake), "model_info": {"max_input_tokens": WINDOW}},
            deployment("gpt-oss-narrow", wire, fake, max_parallel_requests=1),
        ]
        async with gateway({"model_list": deployments}) as running:
            yield Site(wire, fake, running)


async def generation_started(site: Site, choices: int = 1) -> None:
    """Wait until the backend generates and a stream has sent its first tokens."""
    await site.fake.asked(choices)
    await asyncio.sleep(0.08)


REQUEST_FIELDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "stream": {"stream": True},
    "three, whole": {"n": 3},
    "three, stream": {"n": 3, "stream": True},
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("fields", REQUEST_FIELDS.values(), ids=REQUEST_FIELDS)
@pytest.mark.parametrize("phase", PHASES.values(), ids=PHASES)
async def test_a_disconnect_frees_the_backend_at_once(
    site: Site, phase: Callable[[Wire], Script], fields: dict[str, Any]
) -> None:
    site.script_backend(phase(site.wire))
    choices = fields.get("n", 1)
    for disconnect in (Client.leave, Client.crash):
        site.fake.requests.clear()
        client = await site.connect(**fields)
        await generation_started(site, choices)
        left = disconnect(client)
        for index in range(choices):
            assert await site.fake.gone(index) - left < ABORT_LIMIT_S
        assert all(request.done_at is None for request in asked(site.fake))


@pytest.mark.slow
async def test_a_disconnect_during_rendering_sends_no_backend_request(site: Site) -> None:
    site.script_backend(site.wire.script(ANSWERING, faults=(stall_at(9),)))
    now = asyncio.get_running_loop().time
    # Measure the time of rendering without a disconnect.
    started = now()
    control_client = await site.connect(messages=[heavy_message(site)])
    await site.fake.asked()
    rendering_s = now() - started
    assert rendering_s > 0.05
    control_client.leave()
    await site.fake.gone()
    site.fake.requests.clear()
    for fraction, stream in ((0.1, True), (0.35, False)):
        client = await site.connect(messages=[heavy_message(site)], stream=stream)
        await asyncio.sleep(fraction * rendering_s)
        client.leave()
        await asyncio.sleep(rendering_s)
    assert asked(site.fake) == []


SERIAL = itertools.count()


def heavy_message(site: Site) -> dict[str, str]:
    """Build a message with a unique prefix, because rendered messages are cached."""
    return {"role": "user", "content": f"{next(SERIAL)} {LONG_TEXT}"}


async def test_a_disconnect_during_the_request_body_sends_no_backend_request(site: Site) -> None:
    site.script_backend(site.wire.script(DONE))
    for disconnect in (Client.leave, Client.crash):
        client = await site.connect(cut=10)
        await asyncio.sleep(0.02)
        disconnect(client)
    await asyncio.sleep(0.05)
    assert asked(site.fake) == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_disconnect_in_the_queue_frees_the_queue_slot(site: Site, stream: bool) -> None:
    site.script_backend(site.wire.script(ANSWERING, faults=(stall_at(9),)))
    first = await site.connect(model="gpt-oss-narrow", stream=stream)
    await generation_started(site)
    waiting = [await site.connect(model="gpt-oss-narrow", stream=stream) for _ in range(3)]
    await asyncio.sleep(0.05)
    for client in waiting:
        client.leave()
    await asyncio.sleep(0.05)
    assert len(asked(site.fake)) == 1
    site.fake.script = lambda body: site.wire.script(DONE)  # type: ignore[assignment]
    left = first.leave()
    assert await site.fake.gone(0) - left < ABORT_LIMIT_S
    async with asyncio.timeout(2):
        assert message_of(await site.gateway.chat(model="gpt-oss-narrow")).content == "Done."
    assert len(asked(site.fake)) == 2


async def test_a_client_that_leaves_a_finished_response_unread_logs_no_error(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.script_backend(site.wire.script(DONE))
    for stream in (False, True):
        client = await site.connect(stream=stream)
        await site.fake.asked()
        await asyncio.sleep(0.05)
        client.crash()
    await asyncio.sleep(0.05)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.slow
@pytest.mark.parametrize("fields", REQUEST_FIELDS.values(), ids=REQUEST_FIELDS)
async def test_thirty_disconnects_leak_no_resources(
    site: Site, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    await connect_and_disconnect(site, fields, 2)
    before = resources()
    await connect_and_disconnect(site, fields, 30)
    async with asyncio.timeout(5):
        while exceeds(before):
            await asyncio.sleep(0.02)
    # Probes may receive the scripts that were meant for clients.
    bad = [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]
    assert [record for record in bad if record.msg != "backend check failed"] == []


async def connect_and_disconnect(site: Site, fields: dict[str, Any], count: int) -> None:
    """Start several clients at once, in all phases in turn, and disconnect them."""
    scripts = [phase(site.wire) for phase in PHASES.values()]
    number = iter(range(10**6))
    site.fake.script = lambda body: scripts[next(number) % len(scripts)]  # type: ignore[assignment]
    site.fake.requests.clear()
    clients = [await site.connect(**fields) for _ in range(count)]
    await site.fake.asked(count * fields.get("n", 1))
    await asyncio.sleep(0.1)
    for position, client in enumerate(clients):
        (Client.crash if position % 2 else Client.leave)(client)
    for client in clients:
        await asyncio.gather(client.writer.wait_closed(), return_exceptions=True)


def resources() -> dict[str, int]:
    """Count the resources of this process, which runs client, gateway and fake backend."""
    gc.collect()
    return {
        "tasks": len(asyncio.all_tasks()),
        "descriptors": sum(1 for _ in Path("/dev/fd").iterdir()),
    }


def exceeds(before: dict[str, int]) -> bool:
    now = resources()
    return any(now[name] > before[name] for name in before)
