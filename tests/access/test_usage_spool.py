"""Tests of the usage spool: records survive their process and are replayed once."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unisono.access.spool_segment import NEW_SUFFIX, SUFFIX, from_record, to_record
from unisono.access.usage_ledger import UsageLedger
from unisono.access.usage_spool import STALE_S, UsageSpool
from unisono.core.quotas import NO_LIMITS, Account, LedgerLine, QuotaReservation, TokenUsage, UsageRecord
from unisono.errors import StoreUnavailable
from unisono.store.sqlite import SqliteStore

STORE = "redis://user:secret@host:6379/0"
RECORD = UsageRecord(
    "resp_1", LedgerLine(Account("team", "key_1"), "gpt-oss", "2026-11-22", TokenUsage(requests=1, input=7, output=3))
)
CLAIM = QuotaReservation(RECORD.entry.account, "claim", NO_LIMITS, 0, 0, 0, 0.0, period="day:0", period_ends=9e9)
CASES = {
    "without a claim": RECORD,
    "with a claim": replace(RECORD, claim=CLAIM),
    "budget without a period": replace(RECORD, claim=replace(CLAIM, period="none:0", period_ends=None)),
    "text that is not UTF-8": replace(
        RECORD, entry=replace(RECORD.entry, account=Account("t\udc80\n"), model="m\u2028")
    ),
}


@pytest.mark.parametrize("settlement", CASES.values(), ids=CASES)
def test_record_is_one_line_and_round_trips(settlement: UsageRecord) -> None:
    line = to_record(settlement)
    assert line.count(b"\n") == 1
    assert from_record(line) == settlement


class Accounts(SqliteStore):
    """Store that can be down."""

    down = False

    async def settle(self, *settlements: UsageRecord) -> None:
        if self.down:
            raise StoreUnavailable("down")
        await super().settle(*settlements)


async def open_accounts() -> Accounts:
    accounts = Accounts(None)
    await accounts.start()
    return accounts


async def total(accounts: Accounts) -> int:
    return sum(entry.used.requests for entry in await accounts.ledger("0000", "9999"))


def numbered(count: int) -> list[UsageRecord]:
    return [replace(RECORD, once=f"resp_{number}") for number in range(count)]


async def test_records_of_an_ended_process_are_replayed_once_and_deleted(tmp_path: Path) -> None:
    accounts, spool = await open_accounts(), UsageSpool(tmp_path, STORE)
    assert await spool.append(numbered(300))
    await spool.release()
    # One of them was in the ledger before the process died.
    await accounts.settle(numbered(1)[0])
    for _ in range(2):
        await UsageSpool(tmp_path, STORE).replay(accounts)
        assert await total(accounts) == 300
    assert not list(tmp_path.iterdir())
    await accounts.aclose()


DAMAGE = {
    "truncated": to_record(RECORD)[:-9],
    "garbage": b"\x00\xff{",
    "another version": b'{"v": 2}\n',
    "empty": b"\n",
    "not an object": b"[1]\n",
    "deep nesting": b"[" * 200_000 + b"\n",
    "infinite amount": to_record(RECORD).replace(b'"requests":1', b'"requests":1e999'),
    "NaN amount": to_record(RECORD).replace(b'"requests":1', b'"requests":NaN'),
    "unknown amount": to_record(RECORD).replace(b'"requests":1', b'"requests":1,"other":1'),
    "claim of the wrong type": to_record(RECORD).replace(b"{", b'{"claim":[],', 1),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
async def test_damaged_line_does_not_affect_other_records(tmp_path: Path, damage: bytes) -> None:
    accounts, spool = await open_accounts(), UsageSpool(tmp_path, STORE)
    await spool.append(numbered(3))
    await spool.release()
    [path] = tmp_path.iterdir()
    with path.open("ab") as file:
        file.write(damage)
    await UsageSpool(tmp_path, STORE).replay(accounts)
    assert await total(accounts) == 3
    assert not list(tmp_path.iterdir())
    await accounts.aclose()


@pytest.mark.parametrize("kind", ["fifo", "folder", "link to a file", "link to a fifo"])
@pytest.mark.timeout(20)
async def test_only_regular_files_are_opened(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    accounts, folder = await open_accounts(), tmp_path / "spool"
    spool = UsageSpool(folder, STORE)
    await spool.append(numbered(3))
    await spool.release()
    [path] = folder.iterdir()
    other, target = path.with_name(path.name.replace(SUFFIX, f"-other{SUFFIX}")), tmp_path / "target"
    if kind.endswith("fifo"):
        os.mkfifo(target)
    elif kind == "folder":
        target.mkdir()
    else:
        target.write_bytes(to_record(replace(RECORD, once="linked")))
    if kind.startswith("link"):
        other.symlink_to(target)
    else:
        target.rename(other)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    replayer = UsageSpool(folder, STORE)
    for _ in range(3):
        await replayer.replay(accounts)
    assert [record.message for record in caplog.records].count("usage spool segment unreadable") == 1
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert await total(accounts) == 3
    assert list(folder.iterdir()) == [other]
    await accounts.aclose()


async def test_file_of_a_running_process_or_another_store_is_not_replayed(tmp_path: Path) -> None:
    accounts, active = await open_accounts(), UsageSpool(tmp_path, STORE)
    await active.append(numbered(2))
    await UsageSpool(tmp_path, STORE).replay(accounts)
    await active.release()
    await UsageSpool(tmp_path, STORE.replace("host", "other")).replay(accounts)
    assert await total(accounts) == 0
    # The same store with another password.
    await UsageSpool(tmp_path, STORE.replace("secret", "changed")).replay(accounts)
    assert await total(accounts) == 2
    await accounts.aclose()


async def test_file_is_claimed_by_one_process_while_the_store_is_down(tmp_path: Path) -> None:
    accounts = await open_accounts()
    earlier = UsageSpool(tmp_path, STORE)
    await earlier.append(numbered(2))
    await earlier.release()
    accounts.down = True
    first, second = UsageSpool(tmp_path, STORE), UsageSpool(tmp_path, STORE)
    with pytest.raises(StoreUnavailable):
        await first.replay(accounts)
    await second.replay(accounts)
    assert (first.pending, second.pending) == (2, 0)
    accounts.down = False
    await first.replay(accounts)
    assert (first.pending, await total(accounts)) == (0, 2)
    await accounts.aclose()


async def test_path_that_is_not_a_folder_is_an_error(tmp_path: Path) -> None:
    accounts, path = await open_accounts(), tmp_path / "file"
    path.touch()
    spool = UsageSpool(path, STORE)
    assert not await spool.append(numbered(1))
    with pytest.raises(NotADirectoryError):
        await spool.replay(accounts)
    # The folder may be on a disk that is mounted later.
    await UsageSpool(tmp_path / "nowhere", STORE).replay(accounts)
    await accounts.aclose()


async def test_stale_segment_without_records_is_deleted(tmp_path: Path) -> None:
    accounts, spool = await open_accounts(), UsageSpool(tmp_path, STORE)
    assert await spool.append(numbered(1))
    [path] = tmp_path.iterdir()
    fresh, stale = (path.with_name(f"{path.stem}{number}{NEW_SUFFIX}") for number in range(2))
    for segment in (fresh, stale):
        segment.touch()
    modified_at = time.time() - 2 * STALE_S
    os.utime(stale, (modified_at, modified_at))
    await UsageSpool(tmp_path, STORE).replay(accounts)
    assert set(tmp_path.iterdir()) == {path, fresh}
    await spool.release()
    await accounts.aclose()


async def test_segment_that_cannot_be_created_leaves_no_file(tmp_path: Path) -> None:
    spool, descriptors = UsageSpool(tmp_path, STORE), list[int]()
    await asyncio.to_thread(os.getpid)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        with suppress(OSError):
            while True:
                descriptors.append(os.open(os.devnull, os.O_RDONLY))
        # One descriptor is left: enough for the segment, but not for its folder.
        os.close(descriptors.pop())
        assert not await spool.append(numbered(1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in descriptors:
            os.close(descriptor)
    assert not list(tmp_path.iterdir())
    assert await spool.append(numbered(1))


async def test_settlement_during_the_sealing_of_a_segment_is_written(tmp_path: Path) -> None:
    accounts, spool = await open_accounts(), UsageSpool(tmp_path, STORE)
    ledger = UsageLedger(accounts, held_s=10.0, spool=spool)
    async with asyncio.timeout(30):
        for number in range(30):
            first, last = numbered(3 * number + 3)[-2:]
            # This record is not in memory; its segment is sealed after the next write.
            await spool.append(numbered(3 * number + 1)[-1:])
            ledger.record(first)
            while await total(accounts) <= 2 * number:
                await asyncio.sleep(0)
            for _ in range(number):
                await asyncio.sleep(0)
            ledger.record(last)
            while await total(accounts) < 2 * number + 2:
                await asyncio.sleep(0.001)
    await ledger.aclose()
    await accounts.aclose()


async def test_spool_size_is_limited_and_shrinks(tmp_path: Path) -> None:
    spool = UsageSpool(tmp_path, STORE, max_bytes=3 * len(to_record(RECORD)))
    records: Sequence[UsageRecord] = numbered(4)
    assert await spool.append(records[:3])
    assert not await spool.append(records[3:])
    spool.settled(records[:3])
    await spool.shrink()
    assert await spool.append(records[3:])
    assert spool.pending == 1


WRITER = """
import asyncio, os, sys
from pathlib import Path
from tests.access.test_usage_spool import STORE, numbered
from unisono.access.usage_spool import UsageSpool

async def main():
    await UsageSpool(Path(sys.argv[1]), STORE).append(numbered(5))
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


async def test_records_survive_a_killed_process(tmp_path: Path) -> None:
    root: Any = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", WRITER, str(tmp_path)], cwd=root, check=False).returncode == -9
    accounts = await open_accounts()
    await UsageSpool(tmp_path, STORE).replay(accounts)
    assert await total(accounts) == 5
    await accounts.aclose()
