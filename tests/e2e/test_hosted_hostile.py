"""Malicious tool servers and isolation between tenants, tested on a whole gateway."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.api.responses.mounted import mounted
from tests.e2e.gateway import config_of
from tests.e2e.hosting import DOCS, calls, desk, made
from tests.e2e.replicas import Client, replica
from tests.e2e.responses import ANSWER, Json
from tests.e2e.wires import WIRES
from tests.fakes import FakeVllm
from tests.fakes.wire import Seen, Step, Write
from tests.mcp.conftest import Upstream
from tests.mcp.hostile import EVENTS, Hostile, answer

WIRE = WIRES["vllm"]
MIB = 1 << 20
HUGE = 100 * MIB


def small_response(seen: Seen) -> list[Step]:
    return [answer(seen, {"content": []})]


def huge_json_body(seen: Seen) -> Iterator[Step]:
    yield Write(f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {HUGE}\r\n\r\n".encode())
    yield from _huge_text(b'{"jsonrpc":"2.0","id":1,"result":{"content":[{"type":"text","text":"')


def huge_single_event(seen: Seen) -> Iterator[Step]:
    yield Write(EVENTS)
    yield from _huge_text(b'data: {"jsonrpc":"2.0","id":1,"result":{"content":[{"type":"text","text":"')


def huge_event_stream(seen: Seen) -> Iterator[Step]:
    yield Write(EVENTS)
    notification = b'data: {"jsonrpc":"2.0","method":"notifications/message","params":{"data":"%s"}}\n\n' % (b"x" * MIB)
    for _ in range(HUGE // MIB):
        yield Write(notification)


def _huge_text(prefix: bytes) -> Iterator[Step]:
    yield Write(prefix)
    for _ in range(HUGE // MIB):
        yield Write(b"x" * MIB)


def peak_mib(process: int) -> float:
    """Return the peak memory of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


HUGE_RESPONSES = {"one message": huge_json_body, "one event": huge_single_event, "many events": huge_event_stream}


@pytest.mark.slow
async def test_a_response_of_100_mib_is_not_held_in_memory(tmp_path: Path) -> None:
    async with FakeVllm(tokens=[]) as fake, aiohttp.ClientSession() as session:
        behaviours: list[Any] = []
        async with Hostile(lambda seen: behaviours[-1](seen)) as hostile:
            server = {"url": hostile.server().url, "require_approval": "never", "timeout": 20}
            config = config_of(f"vllm@{fake.url}", mcp_servers={"docs": server})
            async with replica(tmp_path / "a", config) as gateway:
                client = Client(gateway.url, session)
                assert gateway.process is not None

                async def respond() -> Json:
                    outputs = iter([calls("act"), ANSWER])
                    fake.script = lambda request: WIRE.script(next(outputs))
                    body = {"model": "gpt-oss", "input": "Go", "tools": [DOCS]}
                    return dict(await client.post("/v1/responses", body))

                behaviours.append(small_response)
                assert made(await respond())[0]["status"] == "completed"
                before = peak_mib(gateway.process.pid)
                for behaviour in HUGE_RESPONSES.values():
                    behaviours.append(behaviour)
                    [call] = made(await respond())
                    assert (call["status"], call["output"]) == ("failed", None)
                # A few copies of the limit of eight megabytes.
                assert peak_mib(gateway.process.pid) - before < 80


SECRETS = {"authorization": "Bearer planted-authorization", "headers": "planted-header", "key": "sk-planted-master-key"}


async def test_no_secret_is_written_to_the_store(upstream: Upstream, tmp_path: Path) -> None:
    key = SECRETS["key"]
    # A header and an authorization for every way to store a response.
    tool = DOCS | {"headers": {"X-Plant": SECRETS["headers"]}, "authorization": SECRETS["authorization"]}
    address = tmp_path / "state.db"
    sections = {"store": {"url": f"sqlite:///{address}"}, "general_settings": {"master_key": key}}
    bearer = {"authorization": f"Bearer {key}"}
    async with desk(upstream, **sections) as harness:
        for fields in ({}, {"background": True}, {"background": True, "stream": True}):
            harness.say(calls("echo", text="dumped"), ANSWER)
            response = await harness.post(headers=bearer, tools=[tool], **fields)
            assert response.status == 200, response.raw
            # Checked during the run too: the request is stored for a takeover.
            assert secrets_in_store(tmp_path) == []
        await upstream.until_noted("echo dumped")
        await asyncio.sleep(0.3)
        database = sqlite3.connect(f"file:{address}?mode=ro", uri=True)
        assert database.execute("SELECT count(*) FROM responses").fetchone()[0] == 3
        database.close()
    assert secrets_in_store(tmp_path) == []


def secrets_in_store(folder: Path) -> list[str]:
    data = b"".join(path.read_bytes() for path in folder.glob("state.db*"))
    assert b"gpt-oss" in data or not data
    words = [word for secret in SECRETS.values() for word in (secret, secret.removeprefix("Bearer "))]
    return [word for word in words if word.encode() in data]


async def test_an_approval_of_another_tenant_is_not_found_and_stays_unused(upstream: Upstream) -> None:
    text = "whose approval"
    async with FakeVllm(tokens=[]) as fake:
        servers = {"docs": {"url": upstream.urls["modern"], "require_approval": "always"}}
        async with mounted(config_of(f"vllm@{fake.url}", mcp_servers=servers)) as gateway:
            fake.script = lambda request: WIRE.script(calls("echo", text=text))
            alices = await gateway.respond(tools=[DOCS])
            [request] = made(alices, "mcp_approval_request")
            fake.script = lambda request: WIRE.script(ANSWER)
            approval = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
            body = {"model": "gpt-oss", "tools": [DOCS], "input": [approval]}
            continued = {**body, "previous_response_id": alices["id"]}
            by_reference = {**body, "input": [{"type": "item_reference", "id": request["id"]}, approval]}
            for input_body in (continued, body, by_reference):
                denied = await gateway.ask("POST", "/v1/responses", input_body, as_="bob")
                assert denied.status == 404, denied.body
            # Items that bob writes himself are his own and use up nothing of hers.
            inlined = {**body, "store": False, "input": [*alices["output"], approval]}
            assert (await gateway.ask("POST", "/v1/responses", inlined, as_="bob")).status == 200
            result = await gateway.ask("POST", "/v1/responses", continued)
            assert [call["output"] for call in made(result.json())] == [text]
            repeated = await gateway.ask("POST", "/v1/responses", continued)
            assert (repeated.status, repeated.json()["error"]["code"]) == (409, "approval_used")
            assert upstream.noted(text) == [f"echo {text}"] * 2
