"""Tests of the SQLite store: crashes, file permissions, full disks and locks."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.state import answered, conversation, response, said
from unisono.core.access import KeyDigest, KeyRecord
from unisono.core.state_store import LogWrite, Retention, Status
from unisono.errors import StoreUnavailable, StoreUnreadable
from unisono.store.sqlite import SqliteStore

ROOT = Path(__file__).parents[2]

WRITER = """
import asyncio, sys
from pathlib import Path
from tests.contract.state import response, said
from unisono.core.state_store import LogWrite
from unisono.store.sqlite import SqliteStore

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    await store.start()
    lease = await store.acquire("ann", "resp_run", "me", 60)
    await store.create("ann", response("resp_run"), lease=lease, log=LogWrite(events=(b"0",)))
    number = 0
    while True:
        number += 1
        await store.create("ann", response(f"resp_{number}", input=(said(str(number), f"msg_{number}"),)))
        await store.log(lease, "resp_run", LogWrite(number, (b"%d" % number,), number - 1, (number,)))
        print(number, flush=True)

asyncio.run(main())
"""


async def test_acknowledged_writes_survive_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout
    try:
        acknowledged = 0
        while acknowledged < 40:
            acknowledged = int(process.stdout.readline())
    finally:
        os.kill(process.pid, signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait()
        process.stdout.close()
    # The last line may be incomplete because of the kill.
    acknowledged = max([acknowledged, *map(int, rest[:-1])])
    store = SqliteStore(path)
    await store.start()
    found = await store.responses("ann", [f"resp_{number}" for number in range(1, acknowledged + 1)])
    assert all(found)
    page = await store.events("ann", "resp_run", 0, limit=10_000)
    assert page is not None
    assert len(page.events) > acknowledged
    assert page.events == tuple(b"%d" % number for number in range(len(page.events)))
    assert await store.tokens("ann", "resp_run") == tuple(range(1, len(page.events)))
    await store.aclose()


async def test_state_survives_reopening_the_file(tmp_path: Path) -> None:
    path, stored = tmp_path / "state.db", response(status=Status.COMPLETED, output=(answered("hi"),))
    for _ in range(2):
        store = SqliteStore(path)
        assert await store.start() == ()
        await store.create("ann", stored)
        assert await store.responses("ann", [stored.id]) == (stored,)
        await store.aclose()


async def test_file_is_accessible_only_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "made" / "state.db"
    store = SqliteStore(path)
    await store.start()
    await store.check()
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
    await store.aclose()


async def test_memory_store_warns_that_state_is_lost() -> None:
    store = SqliteStore(None)
    (warning,) = await store.start()
    assert "memory" in warning
    await store.aclose()


async def test_file_of_a_newer_version_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    store = SqliteStore(path)
    with pytest.raises(StoreUnreadable, match="newer version"):
        await store.start()
    await store.aclose()


async def test_file_without_key_tables_gets_them_at_start(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    for number in range(2):
        store = SqliteStore(path)
        await store.start()
        stored = response(f"resp_{number}")
        await store.create("ann", stored)
        record = await store.put_key(KeyRecord(f"key_{number}", "ann", (KeyDigest(f"digest_{number}"),), 1.0))
        assert await store.key_of(f"digest_{number}") == record
        await store.aclose()
        with closing(sqlite3.connect(path)) as db:
            db.execute("DROP TABLE virtual_keys")
            db.execute("DROP TABLE key_digests")


async def test_path_that_is_not_a_database_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.write_text("not a database" * 100)
    for invalid in (path, tmp_path, path / "below"):
        store = SqliteStore(invalid)
        with pytest.raises(StoreUnavailable):
            await store.start()
        await store.aclose()


async def test_check_of_a_store_that_is_not_open_is_unavailable(tmp_path: Path) -> None:
    store = SqliteStore(None)
    with pytest.raises(StoreUnavailable):
        await store.check()
    await store.start()
    await store.aclose()
    with pytest.raises(StoreUnavailable):
        await store.check()


async def test_full_disk_rejects_writes_as_a_whole_until_space_is_freed(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path)
    await store.start()
    chat = conversation()
    await store.create_conversation("ann", chat)
    assert store._db
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 8}")
    oversized = response(status=Status.COMPLETED, conversation=chat.id, input=(said("x" * 200_000),))
    with pytest.raises(StoreUnavailable):
        await store.create("ann", oversized, revision=0, log=LogWrite(events=(b"0",)))
    assert await store.responses("ann", [oversized.id]) == (None,)
    assert await store.conversation_items("ann", chat.id) == ()
    store._db.execute("PRAGMA max_page_count = 100000")
    await store.create("ann", oversized, revision=0, log=LogWrite(events=(b"0",)))
    assert await store.conversation_items("ann", chat.id) == oversized.input
    await store.aclose()


async def test_sweep_deletes_only_expired_rows(tmp_path: Path) -> None:
    now = 1_000.0
    store = SqliteStore(None, Retention(response_s=100, conversation_s=1_000, log_s=10, key_s=10), clock=lambda: now)
    await store.start()
    expired, recent = response(status=Status.COMPLETED), response(status=Status.COMPLETED)
    chat = conversation()
    await store.create("ann", expired, log=LogWrite(events=(b"0",), tokens=(1,)))
    await store.create_conversation("ann", chat, [said("hi")])
    await store.claim("ann", "key", "digest", expired.id)
    await store.count("ann", "tokens", 1, once="a", for_s=5)
    now += 90
    await store.create("ann", recent, log=LogWrite(events=(b"0",)))
    now += 61
    await store.check()
    assert store._db

    def rows(table: str) -> int:
        assert store._db
        return int(store._db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

    row_counts = {table: rows(table) for table in ("responses", "events", "tokens", "keys", "counters", "counted")}
    assert row_counts == {"responses": 1, "events": 0, "tokens": 0, "keys": 0, "counters": 0, "counted": 0}
    assert await store.responses("ann", [expired.id, recent.id]) == (None, recent)
    assert len(await store.conversation_items("ann", chat.id) or ()) == 1
    await store.aclose()


async def test_cancelled_caller_does_not_undo_its_write(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db")
    await store.start()
    in_progress = response()
    write = asyncio.create_task(store.create("ann", in_progress))
    await asyncio.sleep(0)
    write.cancel()
    with pytest.raises(asyncio.CancelledError):
        await write
    await store.create("ann", in_progress)
    await store.update("ann", replace(in_progress, status=Status.CANCELLED))
    await store.aclose()


@contextmanager
def limited_file_size(size: int) -> Iterator[None]:
    """Limit the size of every file that this process writes, to simulate a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_check_fails_after_a_failed_write_until_space_is_freed(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path)
    await store.start()
    stored = response(input=(said("hi"),))
    await store.create("ann", stored)
    with limited_file_size(path.with_name("state.db-wal").stat().st_size):
        with pytest.raises(StoreUnavailable):
            await store.create("ann", response(input=(said("x" * 100_000),)))
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.check()
        assert await store.responses("ann", [stored.id]) == (stored,)
    await store.check()
    await store.create("ann", response(input=(said("x" * 100_000),)))
    await store.aclose()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM secrets").fetchone() == (0,)


@pytest.mark.parametrize(("low_bytes", "is_tried"), [(0, False), (1 << 62, True)], ids=["plenty", "low"])
async def test_check_tries_a_write_if_disk_space_is_low(tmp_path: Path, low_bytes: int, is_tried: bool) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path, low_bytes=low_bytes)
    await store.start()
    with (
        limited_file_size(path.with_name("state.db-wal").stat().st_size),
        pytest.raises(StoreUnavailable) if is_tried else nullcontext(),
    ):
        await store.check()
    await store.check()
    await store.aclose()


async def test_locked_file_delays_no_read_and_each_write_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes queue up meanwhile; each waits for the lock only once."""
    monkeypatch.setattr("unisono.store.sqlite.LOCK_TIMEOUT_S", 2.0, raising=False)
    path = tmp_path / "state.db"
    store = SqliteStore(path)
    await store.start()
    other = sqlite3.connect(path, isolation_level=None)
    try:
        stored = response()
        await store.create("ann", stored)
        salt = await store.secret("salt", b"1")
        other.execute("BEGIN EXCLUSIVE")
        writes = [asyncio.create_task(store.create("ann", response())) for _ in range(20)]
        await asyncio.sleep(0)
        async with asyncio.timeout(1.5):
            assert await store.responses("ann", [stored.id]) == (stored,)
            assert await store.secret("salt", b"2") == salt
            assert await store.lapsed() == ()
        # In sequence they would take 40 seconds.
        async with asyncio.timeout(10):
            results = await asyncio.gather(*writes, return_exceptions=True)
        assert all(isinstance(result, StoreUnavailable) and "at least 5 s" in str(result) for result in results)
        other.execute("COMMIT")
        await store.create("ann", response())
    finally:
        other.close()
        await store.aclose()


@pytest.mark.parametrize(("continued_at", "is_renewed"), [(9.0, False), (11.0, True)])
async def test_an_ancestor_is_renewed_unless_most_of_its_time_is_left(continued_at: float, is_renewed: bool) -> None:
    now = 0.0
    store = SqliteStore(None, Retention(response_s=100), clock=lambda: now)
    await store.start()
    first = response(status=Status.COMPLETED)
    await store.create("ann", first)
    now = continued_at
    await store.create("ann", response(status=Status.COMPLETED, input=(said("more"),), ancestors=(first.id,)))
    now = 101.0
    assert await store.responses("ann", [first.id]) == (first if is_renewed else None,)
    assert await store.item("ann", first.input[0].id) == (first.input[0] if is_renewed else None)
    await store.aclose()
