"""Tests of the health monitor: a store that starts late, fails and recovers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.contract.servers import Server
from unisono.errors import StoreUnavailable
from unisono.store import open_store
from unisono.store.health_monitor import Upkeep

QUICK_S = 0.05


@asynccontextmanager
async def monitored(url: str, *, or_memory: bool = False) -> AsyncIterator[Upkeep]:
    monitor = Upkeep(open_store(url, or_memory=or_memory), again_s=QUICK_S, look_s=QUICK_S)
    await monitor.start()
    try:
        yield monitor
    finally:
        await monitor.aclose()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_each_failure_and_recovery_of_a_store_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path / "redis", ["appendonly yes", "maxmemory-policy noeviction"])
    try:
        async with monitored(server.url) as monitor:
            assert monitor.reason == "store_unavailable"
            await asyncio.to_thread(server.start)
            await until(lambda: not monitor.reason)
            await asyncio.to_thread(server.end)
            await until(lambda: bool(monitor.reason))
            # Further checks while the store is down log nothing.
            await asyncio.sleep(4 * QUICK_S)
            await asyncio.to_thread(server.start)
            await until(lambda: not monitor.reason)
    finally:
        server.end()
    levels = [record.levelno for record in caplog.records if record.name == "unisono.store"]
    assert [level for level in levels if level == logging.ERROR] == [logging.ERROR] * 2
    assert levels.count(logging.WARNING) == 2


async def test_warnings_of_a_store_are_logged_at_start(caplog: pytest.LogCaptureFixture) -> None:
    async with monitored("memory://") as monitor:
        assert monitor.reason == ""
    assert [record.getMessage() for record in caplog.records if record.name == "unisono.store"] == [
        "store: state is stored in memory only and is lost when this process ends"
    ]


async def test_sqlite_file_is_created_once_its_folder_can_be_created(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    async with monitored(f"sqlite://{tmp_path}/state/state.db") as monitor:
        assert monitor.reason == "store_unavailable"
        (tmp_path / "state").unlink()
        await until(lambda: not monitor.reason)
    assert (tmp_path / "state" / "state.db").exists()


async def test_unreadable_file_is_not_replaced_by_a_memory_store(tmp_path: Path) -> None:
    damaged = tmp_path / "state.db"
    damaged.write_bytes(b"not a database" * 100)
    store = open_store(f"sqlite://{damaged}", or_memory=True)
    with pytest.raises(StoreUnavailable):
        await store.start()
    await store.aclose()
    assert damaged.read_bytes() == b"not a database" * 100


async def test_memory_store_is_used_only_if_it_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    url = f"sqlite://{tmp_path}/file/state.db"
    async with monitored(url, or_memory=True) as monitor:
        assert monitor.reason == ""
    async with monitored(url) as monitor:
        assert monitor.reason == "store_unavailable"


async def test_an_idle_gateway_notices_a_failure_within_the_documented_time(tmp_path: Path) -> None:
    server = Server(tmp_path / "redis").start()
    monitor = Upkeep(open_store(server.url))
    await monitor.start()
    try:
        await until(lambda: not monitor.reason)
        server.end()
        async with asyncio.timeout(6):
            await until(lambda: bool(monitor.reason))
    finally:
        await monitor.aclose()
        server.end()
