"""A SQLite file that is deleted, replaced or damaged while it is open."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.contract.state import response
from unisono.core.state_store import StoredResponse
from unisono.errors import StoreUnavailable
from unisono.store.health_monitor import Upkeep
from unisono.store.sqlite import SqliteStore
from unisono.store.sqlite.connection import DAMAGED, LOG_LOST, MISSING, REPLACED

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


async def refuses(store: SqliteStore, reason: str) -> None:
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=f"^{reason}$"):
            await store.create("ann", response())
        with pytest.raises(StoreUnavailable, match=f"^{reason}$"):
            await store.check()


async def test_writes_are_refused_while_the_file_is_missing(tmp_path: Path) -> None:
    store, stored = await opened(tmp_path / "state.db")
    (tmp_path / "away").mkdir()
    for name in FILES:
        (tmp_path / name).rename(tmp_path / "away" / name)
    await refuses(store, MISSING)
    assert not (tmp_path / "state.db").exists()
    assert await store.responses("ann", [stored.id]) == (stored,)
    for name in FILES:
        (tmp_path / "away" / name).rename(tmp_path / name)
    await store.check()
    later = response()
    await store.create("ann", later)
    await store.aclose()
    assert stored_ids(tmp_path / "state.db") == {stored.id, later.id}


@pytest.mark.parametrize("is_linked", [False, True], ids=["file", "symbolic link"])
@pytest.mark.parametrize("content", ["empty", "backup"])
async def test_writes_are_refused_until_a_replaced_file_is_back(tmp_path: Path, content: str, is_linked: bool) -> None:
    real, former = tmp_path / "state.db", tmp_path / "former.db"
    path = real
    if is_linked:
        path = tmp_path / "link.db"
        path.symlink_to(real)
    store, stored = await opened(path)
    copy = backup(path)
    early = response()
    await store.create("ann", early)
    real.rename(former)
    if content == "backup":
        copy.rename(real)
    else:
        real.touch()
    before = real.read_bytes()
    await refuses(store, REPLACED)
    assert await store.responses("ann", [stored.id, early.id]) == (stored, early)
    assert real.read_bytes() == before
    former.rename(real)
    await store.check()
    later = response()
    await store.create("ann", later)
    # A killed process leaves the file and its log as they are now.
    (tmp_path / "killed").mkdir()
    for name in FILES:
        shutil.copy(tmp_path / name, tmp_path / "killed" / name)
    assert stored_ids(tmp_path / "killed" / "state.db") == {stored.id, early.id, later.id}
    await store.aclose()
    assert stored_ids(path) == {stored.id, early.id, later.id}


@pytest.mark.parametrize("is_opened", [False, True], ids=["the log is deleted", "another file is opened"])
async def test_writes_are_refused_after_the_log_is_lost(tmp_path: Path, is_opened: bool) -> None:
    path = tmp_path / "state.db"
    store, stored = await opened(path)
    if is_opened:
        path.rename(tmp_path / "former.db")
        with closing(sqlite3.connect(path)) as another:
            another.executescript("PRAGMA journal_mode = WAL; CREATE TABLE another (id)")
        await refuses(store, REPLACED)
        (tmp_path / "former.db").rename(path)
    else:
        (tmp_path / "state.db-wal").unlink()
    await refuses(store, LOG_LOST)
    await store.aclose()
    store = SqliteStore(path)
    await store.start()
    later = response()
    await store.create("ann", later)
    await store.aclose()
    # SQLite has discarded the content of the log if it has opened another file beside it.
    assert stored_ids(path) == ({later.id} if is_opened else {stored.id, later.id})


@pytest.mark.parametrize("is_running", [False, True], ids=["killed", "running"])
@pytest.mark.parametrize("is_linked", [False, True], ids=["file", "symbolic link"])
@pytest.mark.parametrize("content", ["missing", "empty"])
async def test_a_process_that_starts_beside_a_former_log_keeps_it(
    tmp_path: Path, content: str, is_linked: bool, is_running: bool
) -> None:
    real, away = tmp_path / "state.db", tmp_path / "former.db"
    path = tmp_path / "link.db" if is_linked else real
    if is_linked:
        path.symlink_to(real)
    earlier, stored = await opened(path)
    if not is_running:
        # A copy of the files is what a killed process leaves.
        for name in FILES:
            shutil.copy(tmp_path / name, tmp_path / f"copy-{name}")
        await earlier.aclose()
        for name in FILES:
            (tmp_path / f"copy-{name}").rename(tmp_path / name)
    real.rename(away)
    if content == "empty":
        real.touch()
    before = (tmp_path / "state.db-wal").read_bytes()
    another = SqliteStore(path, or_memory=True)
    monitor = Upkeep(another, again_s=0.02, look_s=0.02)
    await monitor.start()
    try:
        with pytest.raises(StoreUnavailable, match=f"{path}, is missing or empty, but .*state.db-wal contains writes"):
            await another.start()
        assert monitor.reason == "store_unavailable"
        assert real.exists() == (content == "empty")
        assert (tmp_path / "state.db-wal").read_bytes() == before
        away.rename(real)
        async with asyncio.timeout(10):
            while monitor.reason:
                await asyncio.sleep(0.01)
        assert await another.responses("ann", [stored.id]) == (stored,)
        if is_running:
            await earlier.create("ann", response())
    finally:
        await monitor.aclose()
        await earlier.aclose()


async def test_a_new_file_begins_after_the_former_log_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    (tmp_path / "state.db-wal").write_bytes(b"writes")
    store = SqliteStore(path)
    with pytest.raises(StoreUnavailable, match="is missing or empty"):
        await store.start()
    (tmp_path / "state.db-wal").unlink()
    await store.start()
    await store.create("ann", response())
    await store.aclose()


@pytest.mark.parametrize("is_kept", [False, True], ids=["the former file is lost", "the former file is kept"])
async def test_a_replacing_file_is_not_changed_at_the_end_of_the_process(tmp_path: Path, is_kept: bool) -> None:
    path, former = tmp_path / "state.db", tmp_path / "former.db"
    store, stored = await opened(path)
    copy = backup(path)
    lost = response()
    await store.create("ann", lost)
    if is_kept:
        path.rename(former)
    copy.rename(path)
    await store.aclose()
    log, shared = (tmp_path / name for name in FILES[1:])
    shared.unlink()
    if is_kept:
        log.rename(tmp_path / "former.db-wal")
        assert stored_ids(former) == {stored.id, lost.id}
    else:
        log.unlink()
    assert stored_ids(path) == {stored.id}


async def test_a_damaged_file_is_reported_once_until_the_end_of_the_process(
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
    finally:
        await monitor.aclose()
    for name in FILES[1:]:
        (tmp_path / name).unlink(missing_ok=True)
    copy.rename(path)
    store = SqliteStore(path)
    await store.start()
    await store.check()
    assert await store.key("key_1") is None
    await store.aclose()
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
