"""A SQLite file that is deleted, replaced or damaged while it is open."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.contract.state import response, said
from unisono.core.state_store import StoredResponse
from unisono.errors import StoreUnavailable
from unisono.store.health_monitor import Upkeep
from unisono.store.sqlite import SqliteStore
from unisono.store.sqlite.opened_file import FOREIGN, MISSING
from unisono.store.sqlite.sqlite_errors import DAMAGED

FILES = ("state.db", "state.db-wal", "state.db-shm")


async def opened(path: Path) -> tuple[SqliteStore, StoredResponse]:
    """Return an open store with a salt and one response."""
    store = SqliteStore(path)
    await store.start()
    await store.secret("salt", b"1")
    stored = response()
    await store.create("ann", stored)
    return store, stored


def backup(path: Path) -> Path:
    """Make a backup of the file as an operator does, and return its path."""
    copy = path.with_name("copy.db")
    with closing(sqlite3.connect(path)) as db, closing(sqlite3.connect(copy)) as target:
        db.backup(target)
    return copy


def stored_ids(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return {row[0] for row in db.execute("SELECT id FROM responses")}


async def test_writes_are_refused_while_the_file_is_missing(tmp_path: Path) -> None:
    store, stored = await opened(tmp_path / "state.db")
    (tmp_path / "away").mkdir()
    for name in FILES:
        (tmp_path / name).rename(tmp_path / "away" / name)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=MISSING):
            await store.create("ann", response())
        with pytest.raises(StoreUnavailable, match=MISSING):
            await store.check()
    assert not (tmp_path / "state.db").exists()
    assert await store.responses("ann", [stored.id]) == (stored,)
    for name in FILES:
        (tmp_path / "away" / name).rename(tmp_path / name)
    await store.check()
    later = response()
    await store.create("ann", later)
    await store.aclose()
    assert stored_ids(tmp_path / "state.db") == {stored.id, later.id}


@pytest.mark.parametrize("is_kept", [False, True], ids=["the former file is lost", "the former file is kept"])
async def test_a_backup_that_replaces_the_file_is_opened(tmp_path: Path, is_kept: bool) -> None:
    path, former = tmp_path / "state.db", tmp_path / "former.db"
    store, stored = await opened(path)
    other, early = await opened(path)
    copy = backup(path)
    lost = [response(input=(said("x" * 5000),)) for _ in range(20)]
    for each in lost:
        await store.create("ann", each)
    if is_kept:
        path.rename(former)
    copy.rename(path)
    await store.check()
    assert await store.responses("ann", [stored.id, lost[0].id]) == (stored, None)
    later, latest = response(), response()
    await store.create("ann", later)
    await other.create("ann", latest)
    assert await store.responses("ann", [latest.id]) == (latest,)
    await store.aclose()
    await other.aclose()
    assert stored_ids(path) == {stored.id, early.id, later.id, latest.id}
    if is_kept:
        assert stored_ids(former) == {stored.id, early.id, *(each.id for each in lost)}


async def test_a_file_of_another_store_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store, stored = await opened(path)
    path.rename(tmp_path / "former.db")
    path.touch()
    for content in ("empty", "another salt"):
        if content == "another salt":
            another = SqliteStore(path)
            await another.start()
            await another.secret("salt", b"2")
            await another.aclose()
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=FOREIGN):
                await store.check()
        assert await store.responses("ann", [stored.id]) == (stored,)
    (tmp_path / "former.db").rename(path)
    await store.check()
    await store.aclose()
    assert stored_ids(path) == {stored.id}


async def test_a_backup_before_the_end_of_the_process_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store, stored = await opened(path)
    copy = backup(path)
    await store.create("ann", response())
    copy.rename(path)
    await store.aclose()
    assert stored_ids(path) == {stored.id}


async def test_a_damaged_file_is_reported_once_until_it_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state.db"
    store, _ = await opened(path)
    await store.aclose()
    copy = backup(path)
    # Damage one table, so that a trial write still succeeds.
    with closing(sqlite3.connect(path)) as db:
        page = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'virtual_keys'").fetchone()[0]
        size = db.execute("PRAGMA page_size").fetchone()[0]
    store = SqliteStore(path)
    monitor = Upkeep(store, again_s=0.02, look_s=0.02)
    await monitor.start()
    assert monitor.reason == ""
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(os.urandom(size))
    try:
        with pytest.raises(StoreUnavailable, match=DAMAGED):
            await store.key("key_1")
        async with asyncio.timeout(10):
            while monitor.reason != "store_unavailable":
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert monitor.reason == "store_unavailable"
        copy.rename(path)
        async with asyncio.timeout(10):
            while monitor.reason:
                await asyncio.sleep(0.01)
        assert await store.key("key_1") is None
    finally:
        await monitor.aclose()
    [error] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert error.__dict__["reason"] == DAMAGED
    assert "malformed" in error.__dict__["cause"]


async def test_an_error_that_a_check_does_not_find_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "state.db"
    store, _ = await opened(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE virtual_keys")
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await store.key("key_1")
    await store.check()
    await store.aclose()
    [error] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert error.__dict__["cause"] == "OperationalError: no such table: virtual_keys"
