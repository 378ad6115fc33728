"""Writer of request records to the store, in groups."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.contract.test_store_requests import record
from unisono.core.request_record import RequestRecord
from unisono.observe import request_records
from unisono.observe.request_records import RequestWriter
from unisono.store.sqlite import SqliteStore


class SlowStore(SqliteStore):
    """Store whose writes of records take time; `writes` has their sizes."""

    def __init__(self) -> None:
        super().__init__(None)
        self.writes: list[int] = []

    async def keep_requests(self, *records: RequestRecord, for_s: float, most: int) -> None:
        self.writes.append(len(records))
        await asyncio.sleep(0.02)


@pytest.fixture
def outcomes() -> Counter[str]:
    return Counter()


def writer(store: SlowStore, outcomes: Counter[str]) -> RequestWriter:
    def count(outcome: str, number: int) -> None:
        outcomes[outcome] += number

    return RequestWriter(store, for_s=60, most=1000, count=count)


async def test_records_that_arrive_during_a_write_wait_for_others(
    outcomes: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_records, "GATHER_S", 0.2)
    store = SlowStore()
    keep = writer(store, outcomes)
    for number in range(100):
        keep(record(number))
        await asyncio.sleep(0.005)
    await keep.aclose()
    assert sum(store.writes) == outcomes["kept"] == 100
    # The arrivals take at least half a second. A write for each of them would be about thirty.
    assert len(store.writes) < 15


async def test_the_end_writes_also_the_records_that_arrive_meanwhile(outcomes: Counter[str]) -> None:
    store = SlowStore()
    keep = writer(store, outcomes)
    keep(record(0))
    closing = asyncio.create_task(keep.aclose())
    while not store.writes:
        await asyncio.sleep(0)
    keep(record(1))
    await closing
    assert store.writes == [1, 1]
    assert outcomes == {"kept": 2}
