"""Tests of the usage ledger in Redis after a crash, and with records of earlier versions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.contract.servers import Server
from tests.contract.state import fresh
from unisono.core.quotas import Account, LedgerLine, TokenUsage, UsageRecord
from unisono.core.state_store import Retention
from unisono.errors import StoreUnavailable
from unisono.store.redis import RedisStore, keys
from unisono.store.redis.clients import Command, CommandClient
from unisono.store.redis.connection import Link

DAY = "2026-11-21"
USED = TokenUsage(requests=1, input=90, output=40)

SERVERS = {
    "with an append-only file": (("appendonly yes", "appendfsync always"), 2),
    "without persistence": ((), 1),
}


@pytest.mark.parametrize(("settings", "expected"), SERVERS.values(), ids=SERVERS)
async def test_ledger_is_readable_after_a_crash_with_or_without_persistence(
    tmp_path: Path, settings: tuple[str, ...], expected: int
) -> None:
    server = Server(tmp_path / "redis", settings)
    store = RedisStore(server.start().url, Retention(), deadline_s=5.0)
    owner = Account("ann", fresh("key"))
    try:
        await store.settle(UsageRecord(fresh("turn"), LedgerLine(owner, "gpt-oss", DAY, USED)))
        server.end()
        # The event loop keeps running, so that it notices the disconnect.
        await asyncio.to_thread(server.start)
        await store.settle(UsageRecord(fresh("turn"), LedgerLine(owner, "gpt-oss", DAY, USED)))
        [entry] = await store.ledger(DAY, DAY)
        assert entry.used == TokenUsage(requests=expected, input=90 * expected, output=40 * expected)
    finally:
        await store.aclose()
        server.end()


async def test_settlement_marker_of_an_earlier_version_counts_in_full(tmp_path: Path) -> None:
    owner, once = Account("t", "earlier mark"), "resp_1"
    server = Server(tmp_path / "redis").start()
    store = RedisStore(server.url, Retention(), deadline_s=5.0)
    try:
        with server.client() as client:
            client.set(keys.settlement(owner, DAY, once)[1], "")
        await store.settle(UsageRecord(once, LedgerLine(owner, "m", "2026-11-21", TokenUsage(requests=1, output=7))))
        assert await store.ledger("2026-11-21", "2026-11-21", owner) == ()
    finally:
        await store.aclose()
        server.end()


async def test_settlements_of_one_call_take_one_round_trip_and_count_once(tmp_path: Path) -> None:
    server = Server(tmp_path / "redis").start()
    store = RedisStore(server.url, Retention(), deadline_s=5.0)
    owners = [Account("ann", fresh("key")) for _ in range(3)]
    records = [UsageRecord(fresh("turn"), LedgerLine(owner, "m", DAY, USED)) for owner in owners for _ in range(20)]
    try:
        await store.settle(records[0])
        with server.client() as client:
            # The server has lost the script, and the list of ledgers.
            client.script_flush()
            client.flushall()
            await store.settle(*records)
            await store.settle(*records)
            assert client.info("clients")["connected_clients"] <= 3
        assert {entry.account: entry.used for entry in await store.ledger(DAY, DAY)} == {
            owner: TokenUsage(requests=20, input=1800, output=800) for owner in owners
        }
    finally:
        await store.aclose()
        server.end()


async def test_settlement_without_an_answer_from_a_server_that_lost_its_data_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path / "redis").start()
    store = RedisStore(server.url, Retention(), deadline_s=5.0)
    owner = Account("ann", fresh("key"))
    record = UsageRecord(fresh("turn"), LedgerLine(owner, "m", DAY, USED))
    act_each = Link.act_each

    async def answer_lost(link: Link, *args: Any) -> Any:
        await act_each(link, *args)
        raise StoreUnavailable("the answer was lost")

    try:
        await store.settle(UsageRecord(fresh("turn"), LedgerLine(owner, "m", DAY, USED)))
        with server.client() as client:
            client.flushall()
        with monkeypatch.context() as patch:
            patch.setattr(Link, "act_each", answer_lost)
            with pytest.raises(StoreUnavailable):
                await store.settle(record)
        await store.settle(record)
        assert [entry.used for entry in await store.ledger(DAY, DAY)] == [USED]
    finally:
        await store.aclose()
        server.end()


async def test_settlements_between_which_the_script_is_lost_run_once_and_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path / "redis").start()
    store = RedisStore(server.url, Retention(), deadline_s=5.0)
    owners = [Account("ann", fresh("key")) for _ in range(3)]
    exchange, sent = CommandClient.exchange, list[str]()

    async def flushed_after_the_first(client: CommandClient, commands: Sequence[Command]) -> list[Any]:
        sent.extend(str(name) for name, *_ in commands)
        if len(commands) < 3 or commands[0][0] != "EVALSHA":
            return await exchange(client, commands)
        first, _, *others = await exchange(client, [commands[0], ("SCRIPT", "FLUSH"), *commands[1:]])
        return [first, *others]

    def settlements() -> list[UsageRecord]:
        return [UsageRecord(fresh("turn"), LedgerLine(owner, "m", DAY, USED)) for owner in owners]

    try:
        await store.settle(*settlements())
        with server.client() as client:
            # The server has lost its data, and the scripts while it runs one of several.
            client.flushall()
        monkeypatch.setattr(CommandClient, "exchange", flushed_after_the_first)
        await store.settle(*settlements())
        assert [name for name in sent if name.startswith("EVAL")] == ["EVALSHA"] * 3 + ["EVAL"] * 2
        assert {entry.account: entry.used for entry in await store.ledger(DAY, DAY)} == dict.fromkeys(owners, USED)
    finally:
        await store.aclose()
        server.end()
