"""Tests of Redis users whose access control list denies commands of the gateway."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.contract.servers import Server
from tests.contract.state import response
from unisono.core.state_store import LogWrite
from unisono.errors import StoreUnavailable
from unisono.store.redis import RedisStore

# The permissions in docs/operations.md.
DOCUMENTED = "~t:* &t:* +@all -@dangerous +info"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("permissions") / "redis")
    try:
        yield server.start()
    finally:
        server.end()


@asynccontextmanager
async def opened(server: Server, rules: str) -> AsyncIterator[RedisStore]:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "gateway", "reset", "on", ">secret", *rules.split())
    store = RedisStore(server.url.replace("redis://", "redis://gateway:secret@"), deadline_s=5.0)
    try:
        yield store
    finally:
        await store.aclose()


async def store_response(store: RedisStore) -> None:
    stored = response()
    lease = await store.acquire("ann", stored.anchor, "me", 30)
    assert lease is not None
    await store.create("ann", stored, lease=lease, log=LogWrite(events=(b"0",)))
    await store.log(lease, stored.id, LogWrite(1, (b"1",)))
    assert await store.is_log_complete(lease, stored.id)
    page = await store.events("ann", stored.id, 0, wait_s=1.0)
    assert page is not None
    assert page.events == (b"0", b"1")


async def test_the_documented_permissions_are_sufficient(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(server, DOCUMENTED) as store:
        await store.start()
        await store_response(store)
    assert DOCUMENTED in (Path(__file__).parents[2] / "docs/operations.md").read_text()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# case: (permissions, part of the error of Redis)
DENIED: dict[str, tuple[str, str]] = {
    "scripts": ("~t:* &t:* +@all -@scripting", "'eval'"),
    "the command in the script of the check": ("~t:* &t:* +@all -set", "script"),
}


@pytest.mark.parametrize(("rules", "error"), DENIED.values(), ids=DENIED)
async def test_the_check_fails_if_writes_are_denied(
    server: Server, caplog: pytest.LogCaptureFixture, rules: str, error: str
) -> None:
    async with opened(server, rules) as store:
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="denies a command to the gateway's user"):
                await store.check()
    [record] = [record for record in caplog.records if record.message.startswith("the store denies")]
    assert error in record.__dict__["cause"]


async def test_another_denied_command_is_logged_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(server, "~t:* resetchannels +@all") as store:
        await store.check()
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="denies a command to the gateway's user"):
                await store_response(store)
    [record] = [record for record in caplog.records if record.message.startswith("the store denies")]
    assert "channel" in record.__dict__["cause"]
