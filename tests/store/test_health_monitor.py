"""A store that comes late, goes away and comes back: what is known of it, what is logged, what keeps working."""

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
async def kept(url: str, *, or_memory: bool = False) -> AsyncIterator[Upkeep]:
    upkeep = Upkeep(open_store(url, or_memory=or_memory), again_s=QUICK_S, look_s=QUICK_S)
    await upkeep.start()
    try:
        yield upkeep
    finally:
        await upkeep.aclose()


async def until(fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not fact():
            await asyncio.sleep(0.01)


async def test_one_that_comes_late_leaves_and_comes_back_is_noticed_and_told_once_each_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path / "redis", ["appendonly yes", "maxmemory-policy noeviction"])
    try:
        async with kept(server.url) as upkeep:
            assert upkeep.reason == "store_unavailable"
            await asyncio.to_thread(server.start)
            await until(lambda: not upkeep.reason)
            await asyncio.to_thread(server.end)
            await until(lambda: bool(upkeep.reason))
            # Several looks at a store that is still away say nothing new.
            await asyncio.sleep(4 * QUICK_S)
            await asyncio.to_thread(server.start)
            await until(lambda: not upkeep.reason)
    finally:
        server.end()
    levels = [record.levelno for record in caplog.records if record.name == "unisono.store"]
    assert [level for level in levels if level == logging.ERROR] == [logging.ERROR] * 2
    assert levels.count(logging.WARNING) == 2


async def test_what_a_store_warns_of_is_logged_when_it_is_up(caplog: pytest.LogCaptureFixture) -> None:
    async with kept("memory://") as upkeep:
        assert upkeep.reason == ""
    assert [record.getMessage() for record in caplog.records if record.name == "unisono.store"] == [
        "store: state is stored in memory only and is lost when this process ends"
    ]


async def test_a_file_that_can_be_made_later_is_made_later(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    async with kept(f"sqlite://{tmp_path}/state/state.db") as upkeep:
        assert upkeep.reason == "store_unavailable"
        (tmp_path / "state").unlink()
        await until(lambda: not upkeep.reason)
    assert (tmp_path / "state" / "state.db").exists()


async def test_a_file_of_another_kind_is_never_replaced_by_memory(tmp_path: Path) -> None:
    damaged = tmp_path / "state.db"
    damaged.write_bytes(b"not a database" * 100)
    store = open_store(f"sqlite://{damaged}", or_memory=True)
    with pytest.raises(StoreUnavailable):
        await store.start()
    await store.aclose()
    assert damaged.read_bytes() == b"not a database" * 100


async def test_memory_stands_in_only_where_nobody_chose_the_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    url = f"sqlite://{tmp_path}/file/state.db"
    async with kept(url, or_memory=True) as upkeep:
        assert upkeep.reason == ""
    async with kept(url) as upkeep:
        assert upkeep.reason == "store_unavailable"
