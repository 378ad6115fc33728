"""The embedded store outlives a killed process, guards its file, and never half-writes."""

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


async def test_nothing_acknowledged_is_lost_to_a_killed_process(tmp_path: Path) -> None:
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
    # The last line may have been cut by the kill.
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


async def test_state_is_there_when_the_file_is_opened_again(tmp_path: Path) -> None:
    path, kept = tmp_path / "state.db", response(status=Status.COMPLETED, output=(answered("hi"),))
    for _ in range(2):
        store = SqliteStore(path)
        assert await store.start() == ()
        await store.create("ann", kept)
        assert await store.responses("ann", [kept.id]) == (kept,)
        await store.aclose()


async def test_the_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "made" / "state.db"
    store = SqliteStore(path)
    await store.start()
    await store.check()
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
    await store.aclose()


async def test_memory_says_that_it_forgets() -> None:
    store = SqliteStore(None)
    (warning,) = await store.start()
    assert "memory" in warning
    await store.aclose()


async def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    store = SqliteStore(path)
    with pytest.raises(StoreUnreadable, match="newer version"):
        await store.start()
    await store.aclose()


async def test_a_file_from_before_there_were_keys_takes_them(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    for number in range(2):
        store = SqliteStore(path)
        await store.start()
        kept = response(f"resp_{number}")
        await store.create("ann", kept)
        record = await store.put_key(KeyRecord(f"key_{number}", "ann", (KeyDigest(f"digest_{number}"),), 1.0))
        assert await store.key_of(f"digest_{number}") == record
        await store.aclose()
        with closing(sqlite3.connect(path)) as db:
            db.execute("DROP TABLE virtual_keys")
            db.execute("DROP TABLE key_digests")


async def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.write_text("not a database" * 100)
    for wrong in (path, tmp_path, path / "below"):
        store = SqliteStore(wrong)
        with pytest.raises(StoreUnavailable):
            await store.start()
        await store.aclose()


async def test_a_store_that_is_not_open_says_so(tmp_path: Path) -> None:
    store = SqliteStore(None)
    with pytest.raises(StoreUnavailable):
        await store.check()
    await store.start()
    await store.aclose()
    with pytest.raises(StoreUnavailable):
        await store.check()


async def test_a_full_disk_refuses_whole_writes_and_heals(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path)
    await store.start()
    talk = conversation()
    await store.create_conversation("ann", talk)
    assert store._db
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 8}")
    turn = response(status=Status.COMPLETED, conversation=talk.id, input=(said("x" * 200_000),))
    with pytest.raises(StoreUnavailable):
        await store.create("ann", turn, revision=0, log=LogWrite(events=(b"0",)))
    assert await store.responses("ann", [turn.id]) == (None,)
    assert await store.conversation_items("ann", talk.id) == ()
    store._db.execute("PRAGMA max_page_count = 100000")
    await store.create("ann", turn, revision=0, log=LogWrite(events=(b"0",)))
    assert await store.conversation_items("ann", talk.id) == turn.input
    await store.aclose()


async def test_the_sweep_takes_what_is_dead_and_only_that(tmp_path: Path) -> None:
    now = 1_000.0
    store = SqliteStore(None, Retention(response_s=100, conversation_s=1_000, log_s=10, key_s=10), clock=lambda: now)
    await store.start()
    old, young = response(status=Status.COMPLETED), response(status=Status.COMPLETED)
    talk = conversation()
    await store.create("ann", old, log=LogWrite(events=(b"0",), tokens=(1,)))
    await store.create_conversation("ann", talk, [said("hi")])
    await store.claim("ann", "key", "digest", old.id)
    await store.count("ann", "tokens", 1, once="a", for_s=5)
    now += 90
    await store.create("ann", young, log=LogWrite(events=(b"0",)))
    now += 61
    await store.check()
    assert store._db

    def rows(table: str) -> int:
        assert store._db
        return int(store._db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

    counted = {table: rows(table) for table in ("responses", "events", "tokens", "keys", "counters", "counted")}
    assert counted == {"responses": 1, "events": 0, "tokens": 0, "keys": 0, "counters": 0, "counted": 0}
    assert await store.responses("ann", [old.id, young.id]) == (None, young)
    assert len(await store.conversation_items("ann", talk.id) or ()) == 1
    await store.aclose()


async def test_a_caller_that_leaves_does_not_undo_its_write(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db")
    await store.start()
    running = response()
    write = asyncio.create_task(store.create("ann", running))
    await asyncio.sleep(0)
    write.cancel()
    with pytest.raises(asyncio.CancelledError):
        await write
    await store.create("ann", running)
    await store.update("ann", replace(running, status=Status.CANCELLED))
    await store.aclose()


@contextmanager
def no_file_grows(size: int) -> Iterator[None]:
    """No file of this process can be written beyond `size` bytes: the nearest to a full disk that needs no disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_is_noticed_by_the_check_once_a_write_failed(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path)
    await store.start()
    kept = response(input=(said("hi"),))
    await store.create("ann", kept)
    with no_file_grows(path.with_name("state.db-wal").stat().st_size):
        with pytest.raises(StoreUnavailable):
            await store.create("ann", response(input=(said("x" * 100_000),)))
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.check()
        assert await store.responses("ann", [kept.id]) == (kept,)
    await store.check()
    await store.create("ann", response(input=(said("x" * 100_000),)))
    await store.aclose()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM secrets").fetchone() == (0,)


@pytest.mark.parametrize(("low_bytes", "tried"), [(0, False), (1 << 62, True)], ids=["plenty", "low"])
async def test_a_disk_with_little_space_is_tried_before_it_is_trusted(
    tmp_path: Path, low_bytes: int, tried: bool
) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path, low_bytes=low_bytes)
    await store.start()
    with (
        no_file_grows(path.with_name("state.db-wal").stat().st_size),
        pytest.raises(StoreUnavailable) if tried else nullcontext(),
    ):
        await store.check()
    await store.check()
    await store.aclose()


async def test_a_file_that_another_process_locks_delays_no_read_and_each_write_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes queue up meanwhile: none of them waits for the locks that the others wait for."""
    monkeypatch.setattr("unisono.store.sqlite.LOCK_TIMEOUT_S", 2.0, raising=False)
    path = tmp_path / "state.db"
    store = SqliteStore(path)
    await store.start()
    other = sqlite3.connect(path, isolation_level=None)
    try:
        one = response()
        await store.create("ann", one)
        salt = await store.secret("salt", b"1")
        other.execute("BEGIN EXCLUSIVE")
        writes = [asyncio.create_task(store.create("ann", response())) for _ in range(20)]
        await asyncio.sleep(0)
        async with asyncio.timeout(1.5):
            assert await store.responses("ann", [one.id]) == (one,)
            assert await store.secret("salt", b"2") == salt
            assert await store.lapsed() == ()
        # One after the other, they would take 40 seconds.
        async with asyncio.timeout(10):
            results = await asyncio.gather(*writes, return_exceptions=True)
        assert all(isinstance(result, StoreUnavailable) and "in time" in str(result) for result in results)
        other.execute("COMMIT")
        await store.create("ann", response())
    finally:
        other.close()
        await store.aclose()
