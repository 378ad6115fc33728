"""Tool servers that mean harm, and tenants that mean each other: seen from a whole gateway."""

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
from tests.mcp.conftest import Upstream, start_upstream
from tests.mcp.hostile import EVENTS, Hostile, answer

WIRE = WIRES["vllm"]
MIB = 1 << 20
HUGE = 100 * MIB


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    with start_upstream(tmp_path_factory.mktemp("upstream")) as (_, found):
        yield found


def small(seen: Seen) -> list[Step]:
    return [answer(seen, {"content": []})]


def huge_json(seen: Seen) -> Iterator[Step]:
    yield Write(f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {HUGE}\r\n\r\n".encode())
    yield from _huge(b'{"jsonrpc":"2.0","id":1,"result":{"content":[{"type":"text","text":"')


def huge_event(seen: Seen) -> Iterator[Step]:
    yield Write(EVENTS)
    yield from _huge(b'data: {"jsonrpc":"2.0","id":1,"result":{"content":[{"type":"text","text":"')


def huge_events(seen: Seen) -> Iterator[Step]:
    yield Write(EVENTS)
    notice = b'data: {"jsonrpc":"2.0","method":"notifications/message","params":{"data":"%s"}}\n\n' % (b"x" * MIB)
    for _ in range(HUGE // MIB):
        yield Write(notice)


def _huge(beginning: bytes) -> Iterator[Step]:
    yield Write(beginning)
    for _ in range(HUGE // MIB):
        yield Write(b"x" * MIB)


def peak_mib(process: int) -> float:
    """The most memory that a process ever had."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


ANSWERS = {"one message": huge_json, "one event": huge_event, "many events": huge_events}


@pytest.mark.slow
async def test_an_answer_of_a_hundred_megabytes_is_not_kept_in_memory(tmp_path: Path) -> None:
    async with FakeVllm(tokens=[]) as fake, aiohttp.ClientSession() as session:
        acts: list[Any] = []
        async with Hostile(lambda seen: acts[-1](seen)) as hostile:
            server = {"url": hostile.server().url, "require_approval": "never", "timeout": 20}
            config = config_of(f"vllm@{fake.url}", mcp_servers={"docs": server})
            async with replica(tmp_path / "a", config) as one:
                client = Client(one.url, session)
                assert one.process is not None

                async def asks() -> Json:
                    said = iter([calls("act"), ANSWER])
                    fake.script = lambda asked: WIRE.script(next(said))
                    body = {"model": "gpt-oss", "input": "Go", "tools": [DOCS]}
                    return dict(await client.post("/v1/responses", body))

                acts.append(small)
                assert made(await asks())[0]["status"] == "completed"
                before = peak_mib(one.process.pid)
                for act in ANSWERS.values():
                    acts.append(act)
                    [call] = made(await asks())
                    assert (call["status"], call["output"]) == ("failed", None)
                # A few copies of the eight megabytes that are taken at most.
                assert peak_mib(one.process.pid) - before < 80


SECRETS = {"authorization": "Bearer planted-authorization", "headers": "planted-header", "key": "sk-planted-master-key"}


async def test_no_secret_is_in_the_file_of_the_store(upstream: Upstream, tmp_path: Path) -> None:
    key = SECRETS["key"]
    # A header and an authorization of its own for every way to keep a response.
    tool = DOCS | {"headers": {"X-Plant": SECRETS["headers"]}, "authorization": SECRETS["authorization"]}
    address = tmp_path / "state.db"
    sections = {"store": {"url": f"sqlite:///{address}"}, "general_settings": {"master_key": key}}
    bearer = {"authorization": f"Bearer {key}"}
    async with desk(upstream, **sections) as here:
        for fields in ({}, {"background": True}, {"background": True, "stream": True}):
            here.say(calls("echo", text="dumped"), ANSWER)
            told = await here.post(headers=bearer, tools=[tool], **fields)
            assert told.status == 200, told.raw
            # Looked at while it runs, too: what is asked is kept for whoever takes over.
            assert found_in(tmp_path) == []
        await upstream.until_noted("echo dumped")
        await asyncio.sleep(0.3)
        kept = sqlite3.connect(f"file:{address}?mode=ro", uri=True)
        assert kept.execute("SELECT count(*) FROM responses").fetchone()[0] == 3
        kept.close()
    assert found_in(tmp_path) == []


def found_in(folder: Path) -> list[str]:
    data = b"".join(path.read_bytes() for path in folder.glob("state.db*"))
    assert b"gpt-oss" in data or not data
    words = [word for secret in SECRETS.values() for word in (secret, secret.removeprefix("Bearer "))]
    return [word for word in words if word.encode() in data]


async def test_an_approval_of_another_tenant_is_not_there_and_stays_unused(upstream: Upstream) -> None:
    text = "whose approval"
    async with FakeVllm(tokens=[]) as fake:
        servers = {"docs": {"url": upstream.urls["modern"], "require_approval": "always"}}
        async with mounted(config_of(f"vllm@{fake.url}", mcp_servers=servers)) as desk_of_two:
            fake.script = lambda asked: WIRE.script(calls("echo", text=text))
            first = await desk_of_two.respond(tools=[DOCS])
            [request] = made(first, "mcp_approval_request")
            fake.script = lambda asked: WIRE.script(ANSWER)
            yes = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
            body = {"model": "gpt-oss", "tools": [DOCS], "input": [yes]}
            continued = {**body, "previous_response_id": first["id"]}
            referred = {**body, "input": [{"type": "item_reference", "id": request["id"]}, yes]}
            for sent in (continued, body, referred):
                foreign = await desk_of_two.ask("POST", "/v1/responses", sent, as_="bob")
                assert foreign.status == 404, foreign.body
            # What bob writes himself is his own, and uses up nothing of hers.
            carried = {**body, "store": False, "input": [*first["output"], yes]}
            assert (await desk_of_two.ask("POST", "/v1/responses", carried, as_="bob")).status == 200
            hers = await desk_of_two.ask("POST", "/v1/responses", continued)
            assert [call["output"] for call in made(hers.json())] == [text]
            again = await desk_of_two.ask("POST", "/v1/responses", continued)
            assert (again.status, again.json()["error"]["code"]) == (409, "approval_used")
            assert upstream.noted(text) == [f"echo {text}"] * 2
