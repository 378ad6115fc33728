"""The usage spool: records survive their process, are replayed once, and stay within their bounds."""

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

from unisono.access.usage_ledger import UsageLedger
from unisono.access.usage_spool import NEW_SUFFIX, STALE_S, SUFFIX, UsageSpool, from_record, to_record
from unisono.core.access import NO_LIMITS
from unisono.core.quotas import Account, LedgerLine, QuotaReservation, TokenUsage, UsageRecord
from unisono.errors import StoreUnavailable
from unisono.store.sqlite import SqliteStore

STORE = "redis://user:secret@host:6379/0"
ONE = UsageRecord(
    "resp_1", LedgerLine(Account("team", "key_1"), "gpt-oss", "2026-11-22", TokenUsage(requests=1, input=7, output=3))
)
CLAIM = QuotaReservation(ONE.entry.account, "claim", NO_LIMITS, 0, 0, 0, 0.0, period="day:0", period_ends=9e9)
CASES = {
    "without a claim": ONE,
    "with a claim": replace(ONE, claim=CLAIM),
    "a budget without end": replace(ONE, claim=replace(CLAIM, period="none:0", period_ends=None)),
    "text that is not UTF-8": replace(ONE, entry=replace(ONE.entry, account=Account("t\udc80\n"), model="m\u2028")),
}


@pytest.mark.parametrize("settlement", CASES.values(), ids=CASES)
def test_a_record_is_one_line_and_is_read_as_it_was_written(settlement: UsageRecord) -> None:
    line = to_record(settlement)
    assert line.count(b"\n") == 1
    assert from_record(line) == settlement


class Accounts(SqliteStore):
    """A store that can be out of reach."""

    down = False

    async def settle(self, *settlements: UsageRecord) -> None:
        if self.down:
            raise StoreUnavailable("down")
        await super().settle(*settlements)


async def opened() -> Accounts:
    accounts = Accounts(None)
    await accounts.start()
    return accounts


async def total(accounts: Accounts) -> int:
    return sum(entry.used.requests for entry in await accounts.ledger("0000", "9999"))


def numbered(count: int) -> list[UsageRecord]:
    return [replace(ONE, once=f"resp_{number}") for number in range(count)]


async def test_what_a_process_left_is_replayed_once_and_deleted(tmp_path: Path) -> None:
    accounts, spool = await opened(), UsageSpool(tmp_path, STORE)
    assert await spool.append(numbered(300))
    await spool.release()
    # One of them reached the ledger before the process died.
    await accounts.settle(numbered(1)[0])
    for _ in range(2):
        await UsageSpool(tmp_path, STORE).replay(accounts)
        assert await total(accounts) == 300
    assert not list(tmp_path.iterdir())
    await accounts.aclose()


DAMAGE = {
    "cut off": to_record(ONE)[:-9],
    "garbage": b"\x00\xff{",
    "another version": b'{"v": 2}\n',
    "empty": b"\n",
    "not an object": b"[1]\n",
    "nesting without end": b"[" * 200_000 + b"\n",
    "an infinite amount": to_record(ONE).replace(b'"requests":1', b'"requests":1e999'),
    "an amount that is no number": to_record(ONE).replace(b'"requests":1', b'"requests":NaN'),
    "an unknown amount": to_record(ONE).replace(b'"requests":1', b'"requests":1,"other":1'),
    "a claim of another type": to_record(ONE).replace(b"{", b'{"claim":[],', 1),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
async def test_a_damaged_line_costs_only_itself(tmp_path: Path, damage: bytes) -> None:
    accounts, spool = await opened(), UsageSpool(tmp_path, STORE)
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
    accounts, folder = await opened(), tmp_path / "spool"
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
        target.write_bytes(to_record(replace(ONE, once="linked")))
    if kind.startswith("link"):
        other.symlink_to(target)
    else:
        target.rename(other)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    replaying = UsageSpool(folder, STORE)
    for _ in range(3):
        await replaying.replay(accounts)
    assert [record.message for record in caplog.records].count("usage spool segment unreadable") == 1
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert await total(accounts) == 3
    assert list(folder.iterdir()) == [other]
    await accounts.aclose()


async def test_a_file_of_a_living_process_or_of_another_store_is_left_alone(tmp_path: Path) -> None:
    accounts, living = await opened(), UsageSpool(tmp_path, STORE)
    await living.append(numbered(2))
    await UsageSpool(tmp_path, STORE).replay(accounts)
    await living.release()
    await UsageSpool(tmp_path, STORE.replace("host", "other")).replay(accounts)
    assert await total(accounts) == 0
    # The same store under another password.
    await UsageSpool(tmp_path, STORE.replace("secret", "changed")).replay(accounts)
    assert await total(accounts) == 2
    await accounts.aclose()


async def test_a_file_waits_for_its_store_with_one_process(tmp_path: Path) -> None:
    accounts = await opened()
    left = UsageSpool(tmp_path, STORE)
    await left.append(numbered(2))
    await left.release()
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


async def test_a_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    accounts, path = await opened(), tmp_path / "file"
    path.touch()
    spool = UsageSpool(path, STORE)
    assert not await spool.append(numbered(1))
    with pytest.raises(NotADirectoryError):
        await spool.replay(accounts)
    # Its records may be on another disk that is mounted later.
    await UsageSpool(tmp_path / "nowhere", STORE).replay(accounts)
    await accounts.aclose()


async def test_a_segment_without_records_is_deleted(tmp_path: Path) -> None:
    accounts, spool = await opened(), UsageSpool(tmp_path, STORE)
    assert await spool.append(numbered(1))
    [path] = tmp_path.iterdir()
    fresh, stale = (path.with_name(f"{path.stem}{number}{NEW_SUFFIX}") for number in range(2))
    for one in (fresh, stale):
        one.touch()
    then = time.time() - 2 * STALE_S
    os.utime(stale, (then, then))
    await UsageSpool(tmp_path, STORE).replay(accounts)
    assert set(tmp_path.iterdir()) == {path, fresh}
    await spool.release()
    await accounts.aclose()


async def test_a_segment_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    spool, opened_files = UsageSpool(tmp_path, STORE), list[int]()
    await asyncio.to_thread(os.getpid)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        with suppress(OSError):
            while True:
                opened_files.append(os.open(os.devnull, os.O_RDONLY))
        # Enough for the segment, and not for its folder.
        os.close(opened_files.pop())
        assert not await spool.append(numbered(1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in opened_files:
            os.close(one)
    assert not list(tmp_path.iterdir())
    assert await spool.append(numbered(1))


async def test_a_settlement_that_comes_while_a_segment_is_sealed_is_written(tmp_path: Path) -> None:
    accounts, spool = await opened(), UsageSpool(tmp_path, STORE)
    books = UsageLedger(accounts, held_s=10.0, spool=spool)
    async with asyncio.timeout(30):
        for number in range(30):
            first, last = numbered(3 * number + 3)[-2:]
            # Memory does not have this one: its segment is sealed behind the next write.
            await spool.append(numbered(3 * number + 1)[-1:])
            books.record(first)
            while await total(accounts) <= 2 * number:
                await asyncio.sleep(0)
            for _ in range(number):
                await asyncio.sleep(0)
            books.record(last)
            while await total(accounts) < 2 * number + 2:
                await asyncio.sleep(0.001)
    await books.aclose()
    await accounts.aclose()


async def test_a_spool_is_bounded_and_gives_its_space_back(tmp_path: Path) -> None:
    spool = UsageSpool(tmp_path, STORE, max_bytes=3 * len(to_record(ONE)))
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
    accounts = await opened()
    await UsageSpool(tmp_path, STORE).replay(accounts)
    assert await total(accounts) == 5
    await accounts.aclose()
