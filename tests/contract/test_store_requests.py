"""Contract of every store for request records and their counts."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.contract.state import fresh
from tests.contract.stores import StoreFactory
from unisono.core.request_counts import HOUR_S, MINUTE_S, percentile
from unisono.core.request_filter import RequestFilter
from unisono.core.request_record import RequestRecord
from unisono.core.state_store import Store

LONG_S = 86_400.0
MANY = 10_000


@cache
def an_hour_ago() -> float:
    """Return the same time to all tests of a run. Counts of past days are deleted."""
    return float(int(time.time()) - 3600)


def record(number: int = 0, **fields: Any) -> RequestRecord:
    values: dict[str, Any] = {"id": f"req_{number:04}", "at": an_hour_ago() + number, "duration_s": 0.5, "status": 200}
    return RequestRecord(**values | fields)


async def keep(store: Store, *records: RequestRecord, most: int = MANY) -> None:
    await store.keep_requests(*records, for_s=LONG_S, most=most)


async def ids(store: Store, limit: int = 100, cursor: str = "", **wanted: Any) -> list[str]:
    return [each.id for each in (await store.requests(RequestFilter(**wanted), limit, cursor)).records]


FULL = RequestRecord(
    id="req_full",
    at=0.25,
    duration_s=1.5,
    method="POST",
    route="/v1/chat/completions",
    status=200,
    error="backend_error",
    tenant="ä:}{ *\r\n",
    key="key_1",
    key_name="alice\n\n",
    user="u\x00",
    model="gpt-oss'; --",
    served_model="gpt-oss",
    deployment="vllm-1",
    attempts=(("vllm-2", "backend_error"), ("vllm-1", "")),
    input_tokens=5,
    cached_tokens=2,
    output_tokens=7,
    reasoning_tokens=3,
    first_token_s=0.125,
    waited_s=0.5,
    finish="stop",
    recoveries=("restored-stop", "moved"),
    notes=("metadata", "user"),
    cost=12,
    trace_id="ab",
)


async def test_a_record_is_read_unchanged(factory: StoreFactory) -> None:
    store = await factory.open()
    full = FULL._replace(at=an_hour_ago() + FULL.at)
    await keep(store, full, record(1))
    assert await store.request("req_full") == full
    assert await store.request("req_0001") == record(1)
    assert await store.request("req_0002") is None
    assert (await store.requests(RequestFilter(key="key_1"), 5)).records == (full,)


async def test_a_lone_surrogate_is_replaced(factory: StoreFactory) -> None:
    store = await factory.open()
    await keep(store, record(1, model="gpt-\udcff", user="\ud800"))
    stored = await store.request("req_0001")
    assert stored is not None
    assert (stored.model, stored.user) == ("gpt-?", "?")
    assert await ids(store, model="gpt-\udcff") == ["req_0001"]


async def test_records_are_listed_latest_first_in_pages(factory: StoreFactory) -> None:
    store = await factory.open()
    # Two requests end at the same time.
    await keep(store, *(record(number, at=an_hour_ago() + number // 2) for number in range(7)))
    found, cursor, pages = [], "", 0
    while True:
        page = await store.requests(RequestFilter(), 3, cursor)
        found += [each.id for each in page.records]
        pages += 1
        if page.cursor is None:
            break
        cursor = page.cursor
    assert found == [f"req_{number:04}" for number in (6, 5, 4, 3, 2, 1, 0)]
    assert pages == 3


@pytest.mark.parametrize("cursor", ["x", "12", "x.req", ".", f"{10**19}.req"])
async def test_an_invalid_cursor_is_an_error(cursor: str, factory: StoreFactory) -> None:
    store = await factory.open()
    with pytest.raises(ValueError, match="cursor"):
        await store.requests(RequestFilter(), 3, cursor)


# `since` and `until` are seconds after the first record.
FILTERS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "none": ({}, [5, 4, 3, 2, 1, 0]),
    "key": ({"key": "a"}, [4, 1, 0]),
    "no key": ({"key": ""}, [5, 3, 2]),
    "tenant": ({"tenant": "t"}, [3, 0]),
    "model": ({"model": "m"}, [4, 2]),
    "deployment": ({"deployment": "vllm-1"}, [4, 0]),
    "status": ({"status": 429}, [1]),
    "failed": ({"failed": True}, [3, 1]),
    "any recovery": ({"recovery": "any"}, [5, 2]),
    "recovery": ({"recovery": "moved"}, [5]),
    "two conditions": ({"key": "a", "model": "m"}, [4]),
    "three conditions": ({"key": "a", "failed": True, "status": 429}, [1]),
    "impossible": ({"key": "a", "tenant": "red"}, []),
    "since": ({"since": 4}, [5, 4]),
    "until": ({"until": 2}, [1, 0]),
    "interval of a key": ({"key": "a", "since": 1, "until": 3}, [1]),
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("wanted", "numbers"), FILTERS.values(), ids=FILTERS)
async def test_records_are_filtered(wanted: dict[str, Any], numbers: list[int], factory: StoreFactory) -> None:
    store = await factory.open()
    wanted = {name: an_hour_ago() + value if name in {"since", "until"} else value for name, value in wanted.items()}
    await keep(
        store,
        record(0, key="a", tenant="t", deployment="vllm-1"),
        record(1, key="a", status=429, error="rate_limit_exceeded"),
        record(2, model="m", recoveries=("restored-stop",)),
        record(3, tenant="t", error="backend_error"),
        record(4, key="a", model="m", deployment="vllm-1"),
        record(5, recoveries=("moved", "restored-stop")),
    )
    assert await ids(store, **wanted) == [f"req_{number:04}" for number in numbers]
    paged, cursor = [], ""
    for _ in range(len(numbers) + 1):
        page = await store.requests(RequestFilter(**wanted), 1, cursor)
        paged += [each.id for each in page.records]
        if page.cursor is None:
            break
        cursor = page.cursor
    assert paged == [f"req_{number:04}" for number in numbers]


async def test_a_query_visits_the_rarest_condition_and_a_limited_number(
    factory: StoreFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for backend in ("redis", "sqlite"):
        monkeypatch.setattr(f"unisono.store.{backend}.request_records.MAX_VISITED", 500)
    store = await factory.open()
    # Only the two oldest records have the key and the tenant. 700 later ones have the tenant, and 600 the key.
    await keep(store, *(record(number, key="a", tenant="t", model="m") for number in range(2)))
    await keep(store, *(record(number, tenant="t") for number in range(2, 702)))
    await keep(store, *(record(number, key="a") for number in range(702, 1302)))
    page = await store.requests(RequestFilter(key="a", tenant="t", model="m"), 5)
    assert [each.id for each in page.records] == ["req_0001", "req_0000"]
    assert page.cursor is None
    page = await store.requests(RequestFilter(key="a", tenant="t"), 5)
    assert page.records == ()
    assert page.cursor is not None
    page = await store.requests(RequestFilter(key="a", tenant="t"), 5, page.cursor)
    assert [each.id for each in page.records] == ["req_0001", "req_0000"]
    assert page.cursor is None


async def test_only_the_latest_records_are_stored(factory: StoreFactory) -> None:
    store = await factory.open()
    for start in range(0, 50, 10):
        await keep(store, *(record(number, key="a") for number in range(start, start + 10)), most=15)
    latest = [f"req_{number:04}" for number in range(49, 34, -1)]
    assert await ids(store) == latest
    assert await ids(store, key="a") == latest
    assert await store.request("req_0034") is None


async def test_expired_records_are_deleted_by_the_next_write(factory: StoreFactory) -> None:
    store = await factory.open()
    await keep(store, record(0, key="a"), record(1, key="b"))
    await store.keep_requests(for_s=1.0, most=MANY)
    assert await ids(store) == []
    assert await ids(store, key="a") == []
    assert await store.request("req_0000") is None


async def test_a_record_is_stored_and_counted_once(factory: StoreFactory) -> None:
    store = await factory.open()
    for _ in range(2):
        await keep(store, record(1, key="a"))
    assert await ids(store, key="a") == ["req_0001"]
    points = await store.request_counts(RequestFilter(since=an_hour_ago() - 3600, until=an_hour_ago() + 3600), HOUR_S)
    assert sum(counts["requests"] for counts in points.values()) == 1


async def test_requests_are_counted_by_interval_and_owner(factory: StoreFactory) -> None:
    store = await factory.open()
    start = int(an_hour_ago()) // HOUR_S * HOUR_S
    used = {"input_tokens": 5, "output_tokens": 7, "cost": 3, "first_token_s": 0.1, "model": "m"}
    one = [record(number, at=start + 30 * number, key="a", tenant="t", **used) for number in range(4)]
    failed = {"status": 500, "duration_s": 9.0, "waited_s": 1.25}
    two = [record(number + 10, at=start + 30 * number, **failed) for number in range(4)]
    await keep(store, *one)
    await keep(store, *two)
    # A rollup of a later hour.
    await keep(store, record(99, at=start + HOUR_S))
    wanted = RequestFilter(since=start, until=start + HOUR_S - 1)
    minutes = await store.request_counts(wanted, MINUTE_S)
    assert {at: counts["requests"] for at, counts in minutes.items()} == {start: 4, start + 60: 4}
    (hour,) = (await store.request_counts(wanted, HOUR_S)).values()
    sums = {name: hour[name] for name in ("requests", "errors", "input_tokens", "output_tokens", "cost")}
    assert sums == {"requests": 8, "errors": 4, "input_tokens": 20, "output_tokens": 28, "cost": 12}
    assert hour["duration_ms"] == round(1000 * sum(each.duration_s for each in (*one, *two)))
    assert hour["waited_ms"] == 5000
    assert 0.5 <= (percentile(hour, "duration", 0.5) or 0) < 0.9
    assert 9 <= (percentile(hour, "duration", 0.9) or 0) < 14
    assert 0.1 <= (percentile(hour, "first_token", 0.5) or 0) < 0.2
    owners: list[dict[str, Any]] = [
        {"key": "a"},
        {"tenant": "t"},
        {"model": "m"},
        {"key": "a", "tenant": "t", "model": "m"},
    ]
    for owner in owners:
        (part,) = (await store.request_counts(replace(wanted, **owner), HOUR_S)).values()
        assert part["requests"] == 4
    nobody: list[dict[str, Any]] = [{"key": "b"}, {"key": "", "model": "m"}, {"model": "n"}]
    for none in nobody:
        assert await store.request_counts(replace(wanted, **none), HOUR_S) == {}


async def test_records_are_shared_by_replicas(factory: StoreFactory) -> None:
    if not factory.shared:
        pytest.skip("this store belongs to one process")
    one, two = await factory.open(), await factory.open()
    name = fresh("req")
    await keep(one, record(1, id=name))
    assert await ids(two) == [name]


async def test_records_of_a_key_are_deleted_and_counts_stay(factory: StoreFactory) -> None:
    store = await factory.open()
    await keep(store, *(record(number, key=f"key_{number % 2}", model="m") for number in range(6)))
    assert await store.delete_requests("key_1", 2) == 2
    assert await ids(store) == ["req_0005", "req_0004", "req_0002", "req_0000"]
    assert [await store.delete_requests("key_1", 2) for _ in range(2)] == [1, 0]
    assert await ids(store, key="key_1") == await ids(store, key="key_1", model="m") == []
    assert await ids(store, model="m") == ["req_0004", "req_0002", "req_0000"]
    assert await store.request("req_0005") is None
    # A request that was still running when the records were deleted.
    await keep(store, record(6, key="key_1", model="m"))
    assert await store.request("req_0006") is None
    assert await ids(store, key="key_1") == []
    # The limit counts only the records that are left.
    await keep(store, record(7), most=4)
    assert len(await ids(store)) == 4
    counts = await store.request_counts(
        RequestFilter(key="key_1", since=an_hour_ago() - 60, until=an_hour_ago() + 60), MINUTE_S
    )
    assert sum(each["requests"] for each in counts.values()) == 3
