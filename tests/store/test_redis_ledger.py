"""The ledger of a Redis server that dies: what was acknowledged, and what comes after a server that forgot."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.contract.servers import Server
from tests.contract.state import fresh
from unisono.core.quotas import Account, LedgerLine, TokenUsage, UsageRecord
from unisono.core.state_store import Retention
from unisono.store.redis import RedisStore, keys

DAY = "2026-11-21"
USED = TokenUsage(requests=1, input=90, output=40)

SERVERS = {
    "with an append-only file": (("appendonly yes", "appendfsync always"), 2),
    "that keeps nothing": ((), 1),
}


@pytest.mark.parametrize(("settings", "kept"), SERVERS.values(), ids=SERVERS)
async def test_entries_are_found_after_a_server_was_killed_whatever_it_forgot(
    tmp_path: Path, settings: tuple[str, ...], kept: int
) -> None:
    server = Server(tmp_path / "redis", settings)
    store = RedisStore(server.start().url, Retention(), deadline_s=5.0)
    whose = Account("ann", fresh("key"))
    try:
        await store.settle(UsageRecord(fresh("turn"), LedgerLine(whose, "gpt-oss", DAY, USED)))
        server.end()
        # The loop goes on meanwhile, and sees the connection end.
        await asyncio.to_thread(server.start)
        await store.settle(UsageRecord(fresh("turn"), LedgerLine(whose, "gpt-oss", DAY, USED)))
        [entry] = await store.ledger(DAY, DAY)
        assert entry.used == TokenUsage(requests=kept, input=90 * kept, output=40 * kept)
    finally:
        await store.aclose()
        server.end()


async def test_a_mark_of_an_earlier_version_counts_as_settled_in_full(tmp_path: Path) -> None:
    whose, once = Account("t", "earlier mark"), "resp_1"
    server = Server(tmp_path / "redis").start()
    store = RedisStore(server.url, Retention(), deadline_s=5.0)
    try:
        with server.client() as client:
            client.set(keys.settled(whose, once), "")
        await store.settle(UsageRecord(once, LedgerLine(whose, "m", "2026-11-21", TokenUsage(requests=1, output=7))))
        assert await store.ledger("2026-11-21", "2026-11-21", whose) == ()
    finally:
        await store.aclose()
        server.end()
