"""Request records and their counts in SQLite."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import lru_cache
from itertools import repeat
from typing import Final

from unisono.core.request_counts import COUNTS_KEPT_S, count_facet, counts_of
from unisono.core.request_filter import RequestFilter, facets_of
from unisono.core.request_record import RequestRecord
from unisono.core.request_store import DELETED_S, MAX_VISITED, RequestPage, ended_ms, of_cursor, to_cursor
from unisono.store.codec import decode_request, encode_request
from unisono.store.sqlite.connection import Transaction, Transactions

# Facet of every record.
ALL: Final = ""
# Upper limit of the end time of requests, in milliseconds since 1970.
FAR_MS: Final = 2**53
# Maximum number of cached texts. Most occur often: tenants, keys and models.
TEXTS_CACHED: Final = 4096
# Maximum number of old records that one write deletes, in addition to as many as it adds.
EXTRA_DELETED: Final = 200

# Request records per write to a store in memory. Such a write blocks the event loop for about a millisecond.
RECORDS_PER_MEMORY_WRITE: Final = 16


class SqliteRequests:
    """Part of the SQLite store that implements `RequestStore`."""

    async def keep_requests(self: Transactions, *records: RequestRecord, for_s: float, most: int) -> None:
        size = RECORDS_PER_MEMORY_WRITE if self._is_in_memory else max(1, len(records))
        # A write without records still deletes expired records, so the loop runs at least once.
        for begin in range(0, max(1, len(records)), size):
            await self._run(_write, records[begin : begin + size], for_s, most)
            if self._is_in_memory:
                await asyncio.sleep(0)

    async def delete_requests(self: Transactions, key: str, most: int) -> int:
        return await self._run(_delete_of_key, key, most)

    async def request(self: Transactions, id: str) -> RequestRecord | None:
        return await self._read(_get, id)

    async def requests(self: Transactions, wanted: RequestFilter, limit: int, cursor: str = "") -> RequestPage:
        return await self._read(_page, wanted, limit, cursor)

    async def request_counts(self: Transactions, wanted: RequestFilter, step_s: int) -> dict[int, dict[str, int]]:
        return await self._read(_counts, wanted, step_s)


def _write(act: Transaction, records: Sequence[RequestRecord], for_s: float, most: int) -> None:
    added = []
    deleted = {key for (key,) in act.db.execute("SELECT key FROM request_deleted_keys WHERE expires > ?", (act.now,))}
    facets: list[tuple[str, int, str]] = []
    for record in records:
        if record.key in deleted:
            continue
        ended = ended_ms(record)
        row = (record.id, ended, encode_request(record))
        if act.db.execute("INSERT OR IGNORE INTO requests (id, ended, data) VALUES (?, ?, ?)", row).rowcount:
            added.append(record)
            facets += zip(_facets_of(record), repeat(ended), repeat(record.id))
    act.db.executemany("INSERT OR IGNORE INTO request_facets (facet, ended, id) VALUES (?, ?, ?)", facets)
    _count(act, added)
    total = act.db.execute(
        "INSERT INTO request_total (one, n) VALUES (1, ?) ON CONFLICT (one) DO UPDATE SET n = n + excluded.n "
        "RETURNING n",
        (len(added),),
    ).fetchone()[0]
    expired = (act.now - for_s) * 1000
    first = act.db.execute("SELECT ended FROM request_facets WHERE facet = ? ORDER BY ended LIMIT 1", (ALL,)).fetchone()
    if total <= most and (first is None or first[0] > expired):
        return
    oldest = act.db.execute(
        "SELECT f.ended, f.id, r.data FROM request_facets f JOIN requests r ON r.id = f.id WHERE f.facet = ? "
        "ORDER BY f.ended, f.id LIMIT ?",
        (ALL, len(added) + EXTRA_DELETED),
    ).fetchall()
    _delete(act, [row for place, row in enumerate(oldest) if place < total - most or row[0] <= expired])


def _count(act: Transaction, records: Sequence[RequestRecord]) -> None:
    rows: list[tuple[int, str, int, str, int]] = []
    for (step_s, start, facet), counts in counts_of(records).items():
        rows += zip(repeat(step_s), repeat(_text(facet)), repeat(start), counts, counts.values())
    act.db.executemany(
        "INSERT INTO request_counts (step, facet, start, name, n) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT DO UPDATE SET n = n + excluded.n",
        rows,
    )
    for step_s, kept_s in COUNTS_KEPT_S.items():
        act.db.execute("DELETE FROM request_counts WHERE step = ? AND start < ?", (step_s, act.now - kept_s))


def _delete(act: Transaction, rows: Sequence[tuple[int, str, bytes]]) -> None:
    facets = ((facet, ended, id) for ended, id, data in rows for facet in _facets_of(decode_request(data)))
    act.db.executemany("DELETE FROM request_facets WHERE facet = ? AND ended = ? AND id = ?", facets)
    act.db.executemany("DELETE FROM requests WHERE id = ?", ((id,) for _, id, _ in rows))
    act.db.execute("UPDATE request_total SET n = n - ?", (len(rows),))


def _delete_of_key(act: Transaction, key: str, most: int) -> int:
    act.db.execute("REPLACE INTO request_deleted_keys VALUES (?, ?)", (_text(key), act.now + DELETED_S))
    rows = act.db.execute(
        "SELECT f.ended, f.id, r.data FROM request_facets f JOIN requests r ON r.id = f.id WHERE f.facet = ? "
        "ORDER BY f.ended, f.id LIMIT ?",
        (_text(f"key:{key}"), most),
    ).fetchall()
    _delete(act, rows)
    return len(rows)


def _get(act: Transaction, id: str) -> RequestRecord | None:
    row = act.db.execute("SELECT data FROM requests WHERE id = ?", (id,)).fetchone()
    return None if row is None else decode_request(row[0])


def _page(act: Transaction, wanted: RequestFilter, limit: int, cursor: str) -> RequestPage:
    before = (
        of_cursor(cursor) if cursor else (FAR_MS if wanted.until is None else round(wanted.until * 1000), "\U0010ffff")
    )
    since = round(wanted.since * 1000)
    first, *others = _rarest_first(act, [*map(_text, wanted.facets or (ALL,))], since, before[0])
    fits = " AND ".join(
        "EXISTS (SELECT 1 FROM request_facets o WHERE o.facet = ? AND o.ended = f.ended AND o.id = f.id)"
        for _ in others
    )
    # SQLite computes each row only when it is read, in the order of the primary key. A full page ends the reading.
    rows = act.db.execute(
        f"SELECT ended, id, {fits or 1} FROM request_facets f "  # noqa: S608
        "WHERE facet = ? AND ended >= ? AND (ended, id) < (?, ?) ORDER BY ended DESC, id DESC",
        (*others, first, since, *before),
    )
    found: list[str] = []
    last, follow = before, False
    with closing(rows):
        for visited, (ended, id, is_found) in enumerate(rows):
            if visited == MAX_VISITED or (is_found and len(found) == limit):
                follow = True
                break
            last = ended, id
            if is_found:
                found.append(id)
    records = tuple(record for id in found if (record := _get(act, id)) is not None)
    return RequestPage(records, to_cursor(*last) if follow else None)


def _rarest_first(act: Transaction, facets: Sequence[str], since: int, until: int) -> Sequence[str]:
    """Return the facets by number of records, ascending, so that a query visits few records."""
    if len(facets) == 1:
        return facets
    numbers = {
        facet: act.db.execute(
            "SELECT count(*) FROM (SELECT 1 FROM request_facets WHERE facet = ? AND ended >= ? AND ended <= ? LIMIT ?)",
            (facet, since, until, MAX_VISITED),
        ).fetchone()[0]
        for facet in facets
    }
    return sorted(facets, key=numbers.__getitem__)


def _counts(act: Transaction, wanted: RequestFilter, step_s: int) -> dict[int, dict[str, int]]:
    rows: Iterable[tuple[int, str, int]] = act.db.execute(
        "SELECT start, name, n FROM request_counts WHERE step = ? AND facet = ? AND start > ? AND start <= ? "
        "ORDER BY start",
        (
            step_s,
            _text(count_facet(wanted)),
            wanted.since - step_s,
            FAR_MS if wanted.until is None else wanted.until,
        ),
    )
    points: dict[int, dict[str, int]] = {}
    for start, name, number in rows:
        points.setdefault(start, {})[name] = number
    return points


def _facets_of(record: RequestRecord) -> tuple[str, ...]:
    """Return the facets under which a record is stored."""
    return tuple(map(_text, (ALL, *facets_of(record))))


@lru_cache(maxsize=TEXTS_CACHED)
def _text(value: str) -> str:
    """Return a text that SQLite can store.

    A name that a client chose may contain a lone surrogate.
    """
    return value if value.isascii() else value.encode("utf-8", "replace").decode()
